"""A strategy of one's own: ccviz run --sample 1-recall-a-fact --strategy examples/my_strategy.py:LoudKeys."""

import ccviz


class LoudKeys(ccviz.Strategy):
    """Keeps the tokens whose last-layer keys are longest."""

    def scores(self, entries):
        keys = entries.cache.keys(entries.cache.layers - 1)  # (KV heads, entries, head size)
        return keys.float().norm(dim=-1).mean(0)
