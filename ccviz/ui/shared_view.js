// The text of two runs as one span a token, each drawn as who kept it. Knows what Python sends (shared_view.py) and
// nothing else. Token texts are inserted with textContent only.

const views = new WeakMap()

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".view")
  if (!root || !data) return
  let view = views.get(root)
  if (!view || !sameTexts(view.data.texts, data.texts)) {
    view = build(root, data)
    views.set(root, view)
  }
  update(view, data)
}

function sameTexts(old, texts) {
  return old.length === texts.length && old.every((text, at) => text === texts[at])
}

function build(root, data) {
  const legend = element("div", "legend")
  const tokens = element("div", "tokens")
  const detail = element("div", "detail")
  tokens.tabIndex = 0
  tokens.setAttribute("role", "group")
  detail.setAttribute("aria-live", "polite")
  const spans = data.texts.map((text, at) => {
    const span = element("span", "", text.replace(/\n/g, "⏎\n"))
    span.dataset.position = at
    return span
  })
  tokens.append(...spans)
  root.replaceChildren(legend, tokens, detail)
  const view = { legend, tokens, detail, spans, data }
  tokens.onpointerover = tokens.onclick = (event) => describe(view, event.target.closest("span"))
  return view
}

function update(view, data) {
  view.data = data
  view.tokens.setAttribute("aria-label", data.summary)
  const keys = Object.entries(data.words).map(([state, words]) => element("span", `key ${state}`, words))
  if (data.answer < data.texts.length) keys.push(element("span", "bar", "the answer starts"))
  view.legend.replaceChildren(...keys)
  view.spans.forEach((span, at) => {
    span.className = data.states[at] + (at === data.answer ? " answer" : "")
  })
  view.detail.textContent = "Point at a token to see its position."
}

function describe(view, span) {
  if (!span) return
  view.tokens.querySelector(".here")?.classList.remove("here")
  span.classList.add("here")
  const at = Number(span.dataset.position)
  const { texts, words, states } = view.data
  view.detail.textContent = [`“${texts[at].replace(/\n/g, "⏎")}”`, `position ${at}`, words[states[at]]].join(" · ")
}

function element(tag, className, words) {
  const made = document.createElement(tag)
  if (className) made.className = className
  if (words) made.textContent = words
  return made
}
