"""Memory and time that a model needs, computed before anything is loaded; `quantkit plan` prints them.

Everything but the time of a job follows from config.json and the headers of the weight files (source.py), in
less than a second and without torch. transformers fills in missing values (meta.py), which takes a few
seconds to import. forecast.py makes the complete JSON record; show.py prints it.

The dry run of a job (`quantkit gptq MODEL --dry-run`, quantkit/quantize/prepare/plan.py) builds the
model's modules and knows more; both use the same memory formula.
"""


class Unsupported(Exception):
    """Raised with the reason if a property of a model is unknown, or if a format cannot store the model."""
