"""The record of measurements, gates, tables, plots and the page. Nothing here imports torch."""
