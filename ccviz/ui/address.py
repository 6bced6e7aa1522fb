"""What is on screen, in the page's address, and for those who watch: a link shows the same again.

A *channel* is what one person shows to others: which run, and what of it. Whoever opens its watch link sees it change.
Does without torch.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass, field
from urllib.parse import urlencode

import streamlit as st

from ccviz.ui.player import View

VIEW_PARAMETERS = ("refresh", "order", "pin", "ramp")
MOST_CHANNELS = 200
COOKIE = "ccviz_teach"

_keep_cookie = st.components.v2.component(
    "ccviz_cookie",
    html="<div class='cookie'>\n</div>",
    js="""
export default function ({ data }) {
  const age = data.value ? 12 * 3600 : 0
  document.cookie = `${data.name}=${data.value}; path=/; max-age=${age}; SameSite=Strict`
}
""",
)


@dataclass
class Channel:
    """What one person shows: a job's id and a view of it; ``version`` counts the changes."""

    job: str = ""
    view: View = field(default_factory=View)
    version: int = 0


class Channels:
    """The channels of a server, by the word in their watch link; the longest unused go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, Channel] = {}

    def get(self, key: str) -> Channel | None:
        return self._channels.get(key)

    def show(self, key: str, job_id: str, view: View) -> None:
        """Let those who watch see this."""
        with self._lock:
            channel = self._channels.pop(key, Channel())
            if (channel.job, channel.view) != (job_id, view):
                channel = Channel(job_id, view, channel.version + 1)
            self._channels[key] = channel
            for oldest in list(self._channels)[:-MOST_CHANNELS]:
                del self._channels[oldest]

    def close(self, key: str) -> None:
        with self._lock:
            self._channels.pop(key, None)


@st.cache_resource(max_entries=1, show_spinner=False)
def channels() -> Channels:
    """The channels of this server."""
    return Channels()


def current_view(job_id: str) -> View:
    """What the address says to show of this job; the refresh and the token it named of another are forgotten."""
    state = st.session_state
    if state.get("view_of") not in (None, job_id):
        for name in ("refresh", "pin"):
            st.query_params.pop(name, None)
    state["view_of"] = job_id
    return View.read(st.query_params)


def remember(key: str, job_id: str, view: View) -> None:
    """Put into the address what a player has come to show, and onto the channel, if there is one."""
    state = st.session_state
    told = (job_id, view)
    if state.get(f"told-{key}", (job_id, View.read(st.query_params))) != told:  # else another player spoke last
        said = view.parameters()
        for name in VIEW_PARAMETERS:
            if name in said:
                st.query_params[name] = said[name]
            else:
                st.query_params.pop(name, None)
    state[f"told-{key}"] = told
    show_to_watchers(job_id)


def show_to_watchers(job_id: str) -> None:
    """Let those who watch see the job that this page is about, as its address says."""
    secret = _secret()
    if secret:
        channels().show(watch_key(secret), job_id, current_view(job_id))


def watch_key(secret: str) -> str:
    """The word in a watch link: it does not tell the secret, so who watches cannot show."""
    return hashlib.sha256(secret.encode()).hexdigest()[:12]


def _secret() -> str:
    """What lets this visitor show; "" for who does not. Never in the address, which may be given away."""
    state = st.session_state
    if "teach" not in state:
        state["teach"] = st.context.cookies.get(COOKIE, "")  # of this browser, before it loaded the page anew
    return str(state["teach"])


def share(job_id: str) -> None:
    """Draw the popover with the links to what is on screen."""
    with st.popover("Share", icon=":material/share:"):
        base = str(st.context.url or "").partition("?")[0]
        st.markdown("**A link to what is on screen**")
        st.code(f"{base}?{urlencode(st.query_params.to_dict())}", language=None, wrap_lines=True)
        st.caption("It shows this run, refresh, order and pinned token on this server, for as long as the run is kept.")
        st.markdown("**A link to watch**")
        secret = _secret()
        _keep_cookie(key="teach_cookie", data={"name": COOKIE, "value": secret})
        if secret:
            origin = base.removesuffix("/compare").removesuffix("/")
            st.code(f"{origin}/?{urlencode({'watch': watch_key(secret)})}", language=None, wrap_lines=True)
            st.caption("Whoever opens it sees every run you start, as it happens, and each refresh and token you show.")
            st.button("Stop showing", on_click=_stop, icon=":material/visibility_off:", key="stop_showing")
        else:
            st.caption("Let others see what you run here, as it happens: a class, say.")
            st.button(
                "Show to others", on_click=_start, args=(job_id,), icon=":material/visibility:", key="show_others"
            )


def _start(job_id: str) -> None:
    st.session_state["teach"] = secrets.token_urlsafe(12)
    show_to_watchers(job_id)


def _stop() -> None:
    channels().close(watch_key(_secret()))
    st.session_state["teach"] = ""
