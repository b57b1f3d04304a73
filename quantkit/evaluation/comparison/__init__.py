"""What becomes of measurements: the record, gates, tables, plots, the page. Nothing here imports torch."""
