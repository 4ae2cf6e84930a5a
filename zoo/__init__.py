"""Floor 3: from words to a training run. `HybridLM.from_pattern` is the door from Python, `zoo` the one from a shell."""

__version__ = "0.1.0"
