"""Settings of the whole suite."""

import torch

# the models are tiny: a second thread costs more than it brings, and far more on a busy machine
torch.set_num_threads(1)
