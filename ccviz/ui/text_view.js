// The text of a run as one span a token. Knows what Python sends (ccviz/ui/text_view.py) and nothing else.
// Token texts are inserted with textContent only.

const views = new WeakMap()

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".view")
  if (!root || !data) return
  root.classList.toggle("dark", isDark(root))
  let view = views.get(root)
  if (!view || !sameTexts(view.texts, data.texts)) {
    view = build(root, data)
    views.set(root, view)
  }
  update(view, data)
}

function isDark(root) {
  const parts = getComputedStyle(root).color.match(/[\d.]+/g).map(Number)
  return (parts[0] + parts[1] + parts[2]) / 3 > 128 // light text means a dark page
}

function sameTexts(old, texts) {
  return old.length === texts.length && old.every((text, at) => text === texts[at])
}

function build(root, data) {
  root.replaceChildren()
  const legend = element("div", "legend")
  const tokens = element("div", "tokens")
  const detail = element("div", "detail")
  tokens.tabIndex = 0
  tokens.setAttribute("role", "group")
  detail.setAttribute("aria-live", "polite")
  const spans = data.texts.map((text, at) => {
    const span = element("span", "")
    span.textContent = text.replace(/\n/g, "⏎\n")
    span.dataset.position = at
    return span
  })
  tokens.append(...spans)
  root.append(legend, tokens, detail)
  const view = { texts: data.texts, legend, tokens, detail, spans, data }
  const show = (event) => describe(view, event.target.closest("span"))
  tokens.onpointerover = show
  tokens.onclick = show
  return view
}

function update(view, data) {
  view.data = data
  view.tokens.setAttribute("aria-label", data.summary)
  drawLegend(view.legend, data)
  view.spans.forEach((span, at) => {
    const state = data.states[at]
    let name = state
    if (state === "e" && data.lost?.[at] === data.refresh) name += " now"
    if (state === "k" && data.protected?.[at]) name += " safe"
    if (at === data.answer) name += " answer"
    span.className = name
    if (data.shade) span.style.setProperty("--shade", data.shade[at])
  })
  view.detail.textContent = `Point at a token to see its position${data.words ? "" : " and score"}.`
}

function drawLegend(legend, data) {
  const items = data.words ? stateLegend(data) : scoreLegend(data)
  if (data.answer < data.texts.length) items.push(["span", "bar", "the answer starts"])
  legend.replaceChildren(
    ...items.map((item) => {
      if (!Array.isArray(item)) return item
      const mark = element(item[0], item[1])
      mark.textContent = item[2]
      return mark
    }),
  )
}

// Where Python says what each state means, the legend is those words, each drawn as its tokens are.
function stateLegend(data) {
  return Object.entries(data.words).map(([state, words]) => ["span", `key ${state}`, words])
}

function scoreLegend(data) {
  const score = element("span", "")
  if (data.scored) score.append("score: low", element("span", "ramp"), "high")
  else score.append("not scored at this refresh: nothing had to go")
  return [score, ["s", "", "evicted"], ["span", "pale", "not read yet"], ["span", "under", "protected"]]
}

function describe(view, span) {
  if (!span) return
  view.tokens.querySelector(".here")?.classList.remove("here")
  span.classList.add("here")
  const { data } = view
  const at = Number(span.dataset.position)
  const words = [`“${data.texts[at].replace(/\n/g, "⏎")}”`, `position ${at}`]
  const state = data.states[at]
  if (data.words) {
    view.detail.textContent = [...words, data.words[state]].join(" · ")
    return
  }
  if (state === "u") words.push("not read yet")
  if (state === "e") words.push(`evicted at refresh ${data.lost[at]}`)
  if (state === "k") words.push(data.protected[at] ? `kept (${data.protected[at]})` : "kept")
  if (data.scores[at] !== null) words.push(`score ${data.scores[at]}, rank ${data.ranks[at]} of ${data.scored}`)
  view.detail.textContent = words.join(" · ")
}

function element(tag, className) {
  const made = document.createElement(tag)
  if (className) made.className = className
  return made
}
