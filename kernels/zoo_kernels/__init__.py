"""Floor 1: tensors in, tensors out. The delta-rule family, attention, convolution, norms, and who computes them."""
