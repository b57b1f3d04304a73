"""A conversation whose keys and values are kept from turn to turn."""
