"""Reading and writing checkpoints: files, configurations, and the model without weights."""
