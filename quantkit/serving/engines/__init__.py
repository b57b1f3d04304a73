"""Programs that run what quantkit made, one file each; none is imported before it is asked for."""
