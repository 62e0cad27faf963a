"""ZeRO-3 parameters partitioned before the engine is made, from the one copy that rank 0 loads.

``deepspeed.zero.Init`` around the construction of a model, and transformers' use of it, would save
the copy as well, but not give the same weights: a bf16 model from scratch would be drawn in bf16,
and what is left over in a folder would not be known. Here rank 0 builds the model as ever, with
every check, the others build one without weights on the meta device, and DeepSpeed's own conversion
(which the engine would run on whole models) takes one parameter after the other: rank 0 sends it,
each rank keeps its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UserError
from .engine import deepspeed_config, quiet_deepspeed, without_compiled_operators

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..config import Config
    from .launch import Process


def partition_model(model: PreTrainedModel, config: Config, process: Process) -> None:
    """Partition the parameters of ``model`` over all ranks, in place; collective.

    No rank but 0 ever holds more of the model than its part and one whole parameter.

    Args:
        model: with weights on rank 0, a skeleton elsewhere (:func:`~..model.build_model`).

    Raises:
        UserError: the weights of rank 0 are not those that the model's config describes.
    """
    import deepspeed

    _check_alike(model, process)
    if process.device.type == "cpu":
        without_compiled_operators()
    options = deepspeed_config(config, process.world_size, process.device)
    taken: dict[nn.Parameter, nn.Parameter] = {}
    converted: Any = None
    with quiet_deepspeed():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in taken:
                    taken[parameter] = whole = _on_device(parameter, process.device)
                    if converted is None:
                        holder = nn.ParameterList([whole])
                        deepspeed.zero.Init(module=holder, config_dict_or_path=options)
                        converted = whole
                    else:
                        converted.convert_to_zero_parameters(param_list=[whole])
                module.register_parameter(name, taken[parameter])  # a tied one more than once


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter itself, or memory for one that is on no device."""
    if not parameter.is_meta:
        return parameter
    empty = torch.empty_like(parameter, device=device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _check_alike(model: PreTrainedModel, process: Process) -> None:
    """Ranks take parameters in the order of the model: it must be the same one everywhere."""
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    loaded, *skeletons = process.control.gather(mine)
    for described in skeletons:
        if described != loaded:
            odd = sorted({name for name, _, _ in set(loaded) ^ set(described)})
            raise UserError(
                "train.partitioned_init = true: the weights that rank 0 loaded are not the "
                f"parameters of the model's config ({', '.join(odd[:2])}); mend config.json (a "
                "head in the weights is not tied: tie_word_embeddings), or set it to false"
            )
