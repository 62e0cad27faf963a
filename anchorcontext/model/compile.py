"""``torch.compile`` for what lies between attentions: norms and MLPs of the decoder layers.

Whole layers are not compiled: tracing would go into attention, whose plan is data that differs from
window to window, break the graph at every exchange and compile anew for other plans (minutes for
the first step of a tiny model of three layers on a CPU). Norms and MLPs trace whole, one graph for
all layers, and a second one, for any number of tokens, once that changes.
"""

from __future__ import annotations

from transformers import PreTrainedModel

COMPILED = ("input_layernorm", "post_attention_layernorm", "mlp")


def compile_layers(model: PreTrainedModel) -> None:
    """Compile norms and MLPs of every decoder layer in place; names of parameters stay.

    Compiling happens at the first step; on a CPU it needs a C++ compiler.
    """
    for layer in model.get_decoder().layers:
        for name in COMPILED:
            part = getattr(layer, name, None)
            if part is not None:
                part.compile()
