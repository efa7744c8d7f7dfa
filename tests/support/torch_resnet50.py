"""The same ResNet-50 in torch, from `transformers`, as a reference for the Flax model.

Weights, images and labels are made here from their names, without torch or JAX, by integer
arithmetic that gives the same bits everywhere. Arrays are named and laid out as in the Flax model:
"stage0_block1/conv2/kernel", height x width x in x out.
"""

import zlib

import numpy as np

NUM_CLASSES = 1000
LABELS = np.array([3, 815])
SHAPE = (2, 64, 64, 3)
NUM_ENTRIES = 8  # of each gradient in the file


def uniform(name, shape, low, high):
    """Floats between `low` and `high` that depend on nothing but `name` and `shape`."""
    bits = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return (low + (high - low) * ((bits >> np.uint64(11)) * 2.0**-53)).reshape(shape)


def images():
    return uniform("images", SHAPE, -2, 2)


def weight(name, shape):
    """A parameter or running statistic of ordinary magnitude."""
    kind = name.rpartition("/")[2]
    if kind == "kernel":
        bound = np.sqrt(6 / np.prod(shape[:-1]))
        return uniform(name, shape, -bound, bound)
    low, high = (0.5, 1.5) if kind in ("scale", "var") else (-0.2, 0.2)
    return uniform(name, shape, low, high)


def flax_name(name):
    """The Flax model's name of what torch calls `name`."""
    kinds = {"running_mean": "mean", "running_var": "var", "bias": "bias"}
    place, _, kind = name.rpartition(".")
    if place == "classifier.1":
        return f"head/{kinds.get(kind, 'kernel')}"
    place, _, layer = place.rpartition(".")
    layer, first = ("conv", "kernel") if layer == "convolution" else ("norm", "scale")
    kind = kinds.get(kind, first)
    match place.removeprefix("resnet.").split("."):
        case "embedder", "embedder":
            return f"stem_{layer}/{kind}"
        case "encoder", "stages", stage, "layers", block, "shortcut":
            return f"stage{stage}_block{block}/shortcut_{layer}/{kind}"
        case "encoder", "stages", stage, "layers", block, "layer", number:
            return f"stage{stage}_block{block}/{layer}{int(number) + 1}/{kind}"
    raise ValueError(f"torch has {name}, which the Flax model has not")


def flax_layout(array):
    """Kernels with their output channels last."""
    return array.transpose({4: (2, 3, 1, 0), 2: (1, 0)}.get(array.ndim, (0,)))


def torch_layout(array):
    return array.transpose({4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, (0,)))


def torch_results():
    """Logits in eval and train mode, the mean cross entropy in train mode, and its gradients."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.use_deterministic_algorithms(True)
    config = ResNetConfig(num_labels=NUM_CLASSES, downsample_in_bottleneck=False)
    model = ResNetForImageClassification(config).double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim:  # all but BatchNorm's count of batches
                shape = flax_layout(np.empty(tensor.shape)).shape
                made = torch_layout(weight(flax_name(name), shape))
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(made)))
    x = torch.from_numpy(np.ascontiguousarray(images().transpose(0, 3, 1, 2)))
    with torch.no_grad():
        eval_logits = model.eval()(x).logits
    train_logits = model.train()(x).logits
    loss = torch.nn.functional.cross_entropy(train_logits, torch.from_numpy(LABELS))
    loss.backward()
    gradients = {
        flax_name(name): flax_layout(tensor.grad.numpy())
        for name, tensor in model.named_parameters()
    }
    return {
        "eval_logits": eval_logits.numpy(),
        "train_logits": train_logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        "gradients": gradients,
    }


def summary(results):
    """Replace each gradient by its norm and a few entries, small enough to store."""
    gradients = results["gradients"]
    names = sorted(gradients)
    places = [np.linspace(0, gradients[name].size - 1, NUM_ENTRIES).astype(int) for name in names]
    return {
        **{key: value for key, value in results.items() if key != "gradients"},
        "names": np.array(names),
        "norms": np.array([np.linalg.norm(gradients[name]) for name in names]),
        "entries": np.array(
            [gradients[name].ravel()[at] for name, at in zip(names, places, strict=True)]
        ),
    }
