"""Floor 3: from words to a training run. From Python, `HybridLM.from_pattern` is the door; from a shell, `zoo`."""

__version__ = "0.1.0"
