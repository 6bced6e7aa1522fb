// The whole life of the pinned token: words, its score against the threshold, and what the future expected instead.

const CHART = { width: 320, height: 130, left: 8, right: 8, top: 10, bottom: 22 }

function drawLife(root, player) {
  const { model, state } = player
  if (state.pin < 0 || state.pin >= model.tokens) {
    root.replaceChildren(
      text("h6", "No token pinned"),
      text("p", "Click a cell or a word to pin it. Its life then stands here: when it was read, its score at each refresh, and when it was lost."),
    )
    return
  }
  const life = model.life(state.pin)
  const head = element("div", "head")
  const close = element("button", "")
  close.textContent = "Unpin"
  close.title = "Unpin (Esc)"
  close.onclick = () => player.pin(-1)
  head.append(text("h6", quoted(model.texts[state.pin])), close)
  const where = `position ${state.pin.toLocaleString("en")}, ${state.pin < model.answer ? "prompt" : "answer"}`
  root.replaceChildren(head, text("p", where, "place"), ...sentences(model, life).map((line) => text("p", line)))
  const scored = life.steps.filter((step) => !Number.isNaN(step.score))
  if (scored.length > 1) root.append(chart(model, scored, state.refresh, player))
  if (scored.length) root.append(table(model, scored, player))
  root.append(...expectation(model, state))
}

// A token's life in sentences.
function sentences(model, life) {
  if (life.born < 0) return ["It was read after the last refresh, so nothing has decided about it."]
  const first = `Read before refresh ${life.born + 1}, at ${model.seen[life.born].toLocaleString("en")} tokens.`
  if (life.lost < 0) {
    const last = life.steps.at(-1)
    const safe = last?.protection ? `, ${safety[last.protection] ?? "protected"}` : ""
    return [first, `Still in the cache after refresh ${model.rows}${safe}.`]
  }
  const step = life.steps.find((one) => one.row === life.lost)
  const why =
    step?.rank > 0 ? ` It ranked ${step.rank} of ${step.of}; ${model.after[life.lost].toLocaleString("en")} could stay.` : ""
  return [first, `Evicted at refresh ${life.lost + 1}, after ${model.seen[life.lost].toLocaleString("en")} tokens.${why}`]
}

const safety = {
  frozen: "frozen: it is never ranked",
  sink: "protected as one of the first tokens",
  recent: "protected as one of the newest tokens",
  last: "protected: nothing after it could tell",
}

function chart(model, steps, refresh, player) {
  const figure = element("figure", "chart")
  const values = steps.flatMap((step) => [step.score, step.threshold]).filter((value) => Number.isFinite(value))
  const [low, high] = [Math.min(...values), Math.max(...values)]
  const { width, height, left, right, top, bottom } = CHART
  const x = (at) => left + (at / (steps.length - 1)) * (width - left - right)
  const y = (value) => top + (1 - (high > low ? (value - low) / (high - low) : 0.5)) * (height - top - bottom)
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" })
  const label = `Score from ${number(steps[0].score)} to ${number(steps.at(-1).score)} over ${steps.length} refreshes, against the lowest score that stayed.`
  svg.setAttribute("aria-label", label)
  const line = (pick, name) => {
    const points = steps.map((step, at) => [x(at), pick(step)]).filter(([, value]) => Number.isFinite(value))
    if (points.length > 1) {
      svg.append(shape("polyline", { class: name, points: points.map(([a, b]) => `${a},${y(b)}`).join(" ") }))
    }
    if (points.length < 40) for (const [a, b] of points) svg.append(shape("circle", { class: name, cx: a, cy: y(b), r: 2.5 }))
  }
  line((step) => step.threshold, "threshold")
  line((step) => step.score, "score")
  const now = steps.findIndex((step) => step.row === refresh)
  if (now >= 0) svg.append(shape("line", { class: "now", x1: x(now), x2: x(now), y1: top - 4, y2: height - bottom + 4 }))
  const ends = [...new Set([0, steps.length - 1])]
  for (const at of ends) {
    const mark = shape("text", { x: x(at), y: height - 6, "text-anchor": at ? "end" : "start" })
    mark.textContent = at ? `${model.seen[steps[at].row].toLocaleString("en")} tokens` : model.seen[steps[at].row].toLocaleString("en")
    svg.append(mark)
  }
  const caption = element("figcaption", "")
  caption.append(key("score", "its score"), key("threshold", "the lowest score that stayed"))
  figure.append(svg, caption)
  return figure
}

function table(model, steps, player) {
  const details = element("details", "")
  details.append(text("summary", "Score and rank at each refresh"))
  const body = element("div", "scroll")
  const made = document.createElement("table")
  const head = document.createElement("tr")
  for (const title of ["refresh", "score", "rank", "to stay", ""]) head.append(text("th", title))
  made.append(head)
  for (const step of steps) {
    const row = document.createElement("tr")
    const ends = step.protection || (step.kept ? "kept" : "evicted")
    const rank = `${step.rank} of ${step.of}`
    for (const value of [step.row + 1, number(step.score), rank, number(step.threshold), ends]) row.append(text("td", value))
    made.append(row)
  }
  body.append(made)
  details.append(body)
  details.open = player.lifeOpen ?? false
  details.ontoggle = () => (player.lifeOpen = details.open)
  return details
}

function expectation(model, state) {
  if (!model.expected) return []
  const at = expectedAt(model, state)
  if (at < 0) return [text("p", "What the future expected here was not recorded at any refresh up to this one.", "place")]
  const { probability, words } = model.expectation(at, state.pin)
  const title = text("h6", `What the future expected here, at refresh ${at + 1}`)
  const list = element("ol", "expected")
  const own = model.texts[state.pin]
  const rows = words.map((word) => ({ ...word, own: word.text === own }))
  if (!rows.some((word) => word.own)) rows.push({ text: own, chance: probability, own: true })
  for (const row of rows) {
    const item = element("li", row.own ? "own" : "")
    const bar = element("span", "bar")
    bar.style.setProperty("--part", row.chance)
    item.append(text("span", quoted(row.text), "word"), bar, text("span", percent(row.chance), "chance"))
    list.append(item)
  }
  const surprise = `The token itself got ${percent(probability)}: ${probability > 0.5 ? "predictable, so little is lost without it." : probability > 0.05 ? "not quite predictable." : "a surprise, which only the cache can remember."}`
  return [title, list, text("p", surprise)]
}

// The last refresh up to the one shown at which something was recorded for the pinned token.
function expectedAt(model, state) {
  for (let row = Math.min(state.refresh, model.rows - 1); row >= 0; row--) {
    if (model.expectation(row, state.pin)) return row
  }
  return -1
}

function percent(chance) {
  if (chance >= 0.995) return "100%"
  if (chance >= 0.1) return `${Math.round(100 * chance)}%`
  if (chance >= 0.001) return `${(100 * chance).toFixed(chance >= 0.01 ? 1 : 2)}%`
  return "<0.1%"
}

function number(value) {
  if (!Number.isFinite(value)) return "–"
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString()
}

function quoted(words) {
  return `“${words.replace(/\n/g, "⏎")}”`
}

function key(name, words) {
  const made = element("span", `key ${name}`)
  made.textContent = words
  return made
}

function element(tag, className) {
  const made = document.createElement(tag)
  if (className) made.className = className
  return made
}

function text(tag, words, className = "") {
  const made = element(tag, className)
  made.textContent = words
  return made
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  return made
}
