"""One side of the comparison: the training step of MXNet, its graph unrolled over time.

python -m benchmarks.ten_years.mxnet_side B 2

As MXNet's users wrote it: every symbol of a layer belongs to a group, and `group2ctx` maps the groups to
contexts, the first half of the layers to `cpu(0)` with the embedding, the others to `cpu(1)` with the head.
The engine has a thread for each context, and starts an operator as soon as its inputs are there. Python 3.8
reads this file, and those that it imports.
"""

import sys

import mxnet as mx
import numpy as np

from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work

GATES = 4


def group_of(layer: int) -> str:
    """The name of a layer's group."""
    return f"layer{layer}"


def contexts(work: Work, number: int) -> dict:
    """What `bind` takes as `group2ctx`: neighbouring layers on each context, the ends beside them."""
    on = {group_of(n): mx.cpu(n * number // work.num_layers) for n in range(work.num_layers)}
    return {"embed": mx.cpu(0), "head": mx.cpu(number - 1), **on}


def unrolled(work: Work) -> mx.sym.Symbol:
    """The probabilities of all words, [time x batch, words]; its gradients are those of the mean loss.

    The inputs are `data` and `label`, [time, batch].
    """
    cells, states = [], []
    with mx.AttrScope(ctx_group="embed"):
        table = mx.sym.Variable("table")
        embedded = mx.sym.Embedding(
            mx.sym.Variable("data"), table, input_dim=work.vocab_size, output_dim=work.embed_size
        )
        inputs = mx.sym.SliceChannel(embedded, num_outputs=work.seq_len, axis=0, squeeze_axis=True)
    for layer in range(work.num_layers):
        with mx.AttrScope(ctx_group=group_of(layer)):
            cells.append(mx.rnn.LSTMCell(work.hidden_size, prefix=f"l{layer}_"))
            states.append([mx.sym.Variable(f"l{layer}_begin_{name}") for name in "hc"])
    outputs = []
    for x in inputs:
        for layer, cell in enumerate(cells):
            with mx.AttrScope(ctx_group=group_of(layer)):
                x, states[layer] = cell(x, states[layer])
        outputs.append(x)
    with mx.AttrScope(ctx_group="head"):
        logits = mx.sym.FullyConnected(
            mx.sym.Concat(*outputs, dim=0),
            mx.sym.Variable("kernel"),
            mx.sym.Variable("bias"),
            num_hidden=work.vocab_size,
        )
        label = mx.sym.Reshape(mx.sym.Variable("label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(logits, label, normalization="batch")


def arguments(work: Work) -> dict:
    """The value of every argument of the graph, by name."""
    weights, H = work.weights(), work.hidden_size
    inputs, targets = work.text()
    values = {
        "data": inputs.T,
        "label": targets.T,
        "table": weights["table"],
        "kernel": weights["kernel"].T,
        "bias": weights["bias"],
    }
    for layer in range(work.num_layers):
        for theirs, ours in (("i2h", "w_x"), ("h2h", "w_h")):
            kernel = weights[f"{ours}_{layer}"]
            values[f"l{layer}_{theirs}_weight"] = kernel.reshape(len(kernel), GATES * H).T
            values[f"l{layer}_{theirs}_bias"] = np.zeros(GATES * H)
        for name in "hc":
            values[f"l{layer}_begin_{name}"] = np.zeros((work.batch_size, H))
    return values


def is_trained(name: str) -> bool:
    """Whether it is a parameter; one bias of a layer is trained, the other stays zero."""
    return name in ("table", "kernel", "bias") or name.endswith(("_weight", "_i2h_bias"))


def main() -> None:
    """Serves steps."""
    work, number = WORKS[sys.argv[1]], int(sys.argv[2])
    graph, group2ctx = unrolled(work), contexts(work, number)
    values, attributes = arguments(work), graph.attr_dict()
    arrays = {
        name: mx.nd.array(values[name], group2ctx[attributes[name]["ctx_group"]])
        for name in graph.list_arguments()
    }
    grads = {name: mx.nd.zeros_like(array) for name, array in arrays.items() if is_trained(name)}
    kinds = {name: "write" if name in grads else "null" for name in arrays}
    executor = graph.bind(mx.cpu(0), arrays, grads, kinds, group2ctx=group2ctx)

    def step() -> float:
        [probabilities] = executor.forward(is_train=True)
        executor.backward()
        loss = -mx.nd.log(mx.nd.pick(probabilities, arrays["label"].reshape((-1,)))).mean()
        for name, grad in grads.items():
            mx.nd.sgd_update(arrays[name], grad, lr=LEARNING_RATE, wd=0.0, out=arrays[name])
        mx.nd.waitall()
        return float(loss.asscalar())

    serve(step)


if __name__ == "__main__":
    main()
