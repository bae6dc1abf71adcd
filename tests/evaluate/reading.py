"""A text read by a model, as an evaluation reads it."""

from otaro.evaluate.meters import Loss
from otaro.evaluate.windows import ModelReader, Windows, read


def perplexity(model, ids, *, window, stride=None, bos=None):
    loss = Loss(bos is not None)
    read(
        ModelReader(model, comparing=False),
        Windows(ids, window, stride, bos),
        [loss],
        lambda done, total: None,
    )
    return loss.perplexity
