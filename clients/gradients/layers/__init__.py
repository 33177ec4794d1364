"""Table of layer rules: functions that compute per-example gradients, one for each type of module.

A rule runs a module on a padded batch and records each call as a `LayerUse`, which computes the
per-example gradients. The rule returns None for a call that it does not cover, and the module then
runs through `torch.func`. A new rule needs a function in one of the modules here, and a tested
subclass of `LayerUse` if none of those here fits.

Gradient norms are never under-estimated. If per-example gradients are held in memory, their norms
are computed in float64 from the values that are released. The gradients of a large linear layer on
sequences are not held in memory. Their norms include a bound on all rounding errors, those of the
norm and those of the released sum (Higham 2002, section 3.1).
"""

from collections.abc import Mapping

from torch import nn

from fedsim.clients.gradients.layers.affine import (
    INSTANCE_NORMS,
    batch_norm_rule,
    group_norm_rule,
    instance_norm_rule,
    layer_norm_rule,
    prelu_rule,
    rms_norm_rule,
)
from fedsim.clients.gradients.layers.base import Rule
from fedsim.clients.gradients.layers.convolution import convolution_rule
from fedsim.clients.gradients.layers.embedding import embedding_bag_rule, embedding_rule
from fedsim.clients.gradients.layers.linear import linear_rule
from fedsim.clients.gradients.layers.recurrent import recurrent_rule, run_cell, run_layers

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Exactly these types: a subclass may compute something else.
RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear_rule,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution_rule),
    nn.Embedding: embedding_rule,
    nn.EmbeddingBag: embedding_bag_rule,
    nn.LayerNorm: layer_norm_rule,
    nn.RMSNorm: rms_norm_rule,
    nn.GroupNorm: group_norm_rule,
    **dict.fromkeys(INSTANCE_NORMS, instance_norm_rule),
    **dict.fromkeys(_BATCH_NORMS, batch_norm_rule),
    nn.PReLU: prelu_rule,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent_rule(run_layers)),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), recurrent_rule(run_cell)),
}
