"""Floor 2: token mixers and the blocks they stand in, as nn.Modules."""
