"""The same BERT in torch, from `transformers`, as a reference for the Flax model.

Weights and sequences are made here from their names, without torch or JAX, by integer arithmetic
that gives the same bits everywhere. Arrays have the names and the layout they were published with:
"bert/encoder/layer_0/attention/self/query/kernel", in x out.
"""

import numpy as np

from tests.support.torch_resnet50 import uniform

SIZES = {"num_layers": 3, "hidden": 24, "num_heads": 3, "vocabulary": 61, "max_length": 20}
LENGTHS = np.array([16, 11, 7], np.int32)
POSITIONS = np.array([[1, 5, 14, 15], [2, 10, 0, 0], [6, 0, 0, 0]], np.int32)
TARGETS = np.array([[7, 60, 0, 31], [12, 12, -1, -1], [45, -1, -1, -1]], np.int32)  # -1: none
IS_RANDOM = np.array([0, 1, 1], np.int32)


def tokens():
    """Token ids without 0, which gets no gradient in torch."""
    return uniform("tokens", (3, 16), 1, SIZES["vocabulary"]).astype(np.int32)


def segments():
    return (np.arange(16) >= np.array([[9], [4], [3]])).astype(np.int32)


def weight(name, shape):
    """A parameter of ordinary magnitude."""
    if name.endswith("gamma"):
        return uniform(name, shape, 0.5, 1.5)
    bound = np.sqrt(3 / shape[0]) if name.endswith("kernel") else 0.5
    return uniform(name, shape, -bound, bound)


def published_name(name):
    """The published name of what torch calls `name`."""
    match name.split("."):
        case "cls", "predictions", "bias":
            return "cls/predictions/output_bias"
        case "cls", "seq_relationship", kind:
            return f"cls/seq_relationship/output_{'weights' if kind == 'weight' else 'bias'}"
        case *place, "LayerNorm", kind:
            place = [*place, "LayerNorm", "gamma" if kind == "weight" else "beta"]
        case "bert", "embeddings", table, "weight":
            place = ["bert", "embeddings", table]
        case *place, kind:
            place = [*place, "kernel" if kind == "weight" else "bias"]
    return "/".join(place).replace("/layer/", "/layer_")


def turned(name, array):
    """From torch's layout to the published one, and back: kernels are in x out here, not there."""
    return array.T if name.endswith("kernel") else array


def torch_results():
    """Logits at the masked positions and of the next sentence, the loss, and its gradients."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    torch.use_deterministic_algorithms(True)
    config = BertConfig(
        vocab_size=SIZES["vocabulary"],
        hidden_size=SIZES["hidden"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        intermediate_size=4 * SIZES["hidden"],
        max_position_embeddings=SIZES["max_length"],
        hidden_act="gelu_new",
        layer_norm_eps=1e-12,
    )
    model = BertForPreTraining(config).double().eval()  # without dropout
    with torch.no_grad():
        for torch_name, tensor in model.named_parameters():
            name = published_name(torch_name)
            shape = turned(name, np.empty(tensor.shape)).shape
            made = turned(name, weight(name, shape))
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(made)))
    labels = np.full(tokens().shape, -100)  # to be ignored
    rows, places = np.nonzero(TARGETS >= 0)
    labels[rows, POSITIONS[rows, places]] = TARGETS[rows, places]
    found = model(
        input_ids=torch.from_numpy(tokens()).long(),
        token_type_ids=torch.from_numpy(segments()).long(),
        attention_mask=torch.from_numpy(np.arange(16) < LENGTHS[:, None]).long(),
        labels=torch.from_numpy(labels).long(),
        next_sentence_label=torch.from_numpy(IS_RANDOM).long(),
    )
    found.loss.backward()
    logits = found.prediction_logits.detach().numpy()
    return {
        "words": logits[np.arange(3)[:, None], POSITIONS],
        "next_sentence": found.seq_relationship_logits.detach().numpy(),
        "loss": found.loss.detach().numpy(),
        "gradients": {
            published_name(name): turned(published_name(name), tensor.grad.numpy())
            for name, tensor in model.named_parameters()
        },
    }
