"""A checkpoint coming in: its files, its configuration, and the model without weights."""
