"""Preparation before weights are loaded: recipe, one LinearSpec per linear, memory and disk of a job."""
