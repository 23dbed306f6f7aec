"""Files of torch.save, read without unpickling and without torch.load.

A file holds what its bytes hold: what is read from it is bounded by its size, whatever it says.
Nothing in it is called, extracted or written anywhere.
"""

from lowtide.models.checkpoints.state_dict import read_state_dict

__all__ = ["read_state_dict"]
