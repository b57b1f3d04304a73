"""Before anything is loaded: the recipe, one row per linear, the memory and disk that a job needs."""
