"""The JSON record of measurements, gates, tables, plots and the HTML page. Nothing here imports torch."""
