"""How to read the pictures: the words, the strategies and the colours, on one page."""

from __future__ import annotations

import streamlit as st

from ccviz.strategies import strategy_class, strategy_names
from ccviz.ui import page
from ccviz.ui.kept import take_dropped

WORDS = {
    "position": "A token's place in the whole text, from 0. It never changes, whatever is evicted.",
    "entry": "What the cache keeps of one token: its keys and values in all layers.",
    "refresh": "The moment when all entries are scored and only the best J stay.",
    "score": "What a strategy gives an entry; higher is kept. Ties go to the later token.",
    "frozen": "The first tokens (the system prompt, say) that are never evicted. They count towards J.",
    "J, cache size": "How many entries survive a refresh.",
    "h, chunk size": "Tokens read or written between two refreshes. The cache never holds more than J + h entries.",
}


def main() -> None:
    """Draw the page."""
    page.begin("How to read it")
    take_dropped()
    with st.sidebar:
        page.end()
    st.markdown("## How to read it")
    st.markdown(
        "A language model remembers its text in a **key-value cache**, one entry a token. The cache grows with the "
        "text, so long texts need a way to forget. ccviz runs a model under a cache of bounded size and shows which "
        "tokens were kept at every step, and which were lost."
    )
    st.markdown("#### The pictures")
    st.markdown(
        "- **Player.** Point at a cell and its word is framed in the text, and the reverse. Click to pin a token: its "
        "life stands beside the text, its score at each refresh against the lowest that stayed, and what the future "
        "expected in its place. Find a word, drag a box to zoom, press play. Every key is listed below it.\n"
        "- **Heatmap.** One row a refresh, top to bottom as time passes; one cell an entry that the cache kept. The "
        "colour says where in the text the token stands: blue is the beginning, red the end. A row that is all red has "
        "forgotten the beginning.\n"
        "- **Text.** Every token at one refresh. Struck through: evicted. Pale: not read yet. The stronger the orange, "
        "the higher the strategy ranked it. Underlined: protected.\n"
        "- **Compare.** Several strategies on one prompt, on one colour scale. *Shared* is the Jaccard index: of the "
        "entries that at least one of two caches holds, the part that both hold. *Harm* is how far a bounded cache "
        "moves the model's predictions from the full cache's (KL divergence, in nats) when both are fed one answer.\n"
        "- **Order of the slots.** *By score rank* puts the best first, as in the paper's Figure 4; *by position* the "
        "oldest; *in place* leaves each token in one column for as long as it lives."
    )
    st.markdown("#### The words")
    for word, meaning in WORDS.items():
        st.markdown(f"**{word}.** {meaning}")
    st.markdown("#### The strategies")
    for name in strategy_names():
        strategy = strategy_class(name)
        st.markdown(f"**{strategy.title}** (`{name}`). {strategy.summary}")
        st.caption(strategy.source)


main()
