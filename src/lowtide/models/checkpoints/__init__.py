"""Safe readers of torch.save files, without unpickling and without torch.load.

What is read from a file is bounded by its size, whatever it claims. Nothing in it is called,
extracted or written anywhere.
"""

from lowtide.models.checkpoints.state_dict import read_state_dict

__all__ = ["read_state_dict"]
