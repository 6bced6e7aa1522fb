// One row of a counter-causal pass, stage by stage: the mask, and the arithmetic in words and bars. The numbers are
// Python's (ccviz/lessons.py).

const STAGES = 5
const states = new WeakMap()

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".row")
  if (!root || !data) return
  let state = states.get(root)
  if (!state) {
    state = { row: 1, stage: 0 }
    states.set(root, state)
  }
  draw(root, data, state)
}

function draw(root, data, state) {
  const again = () => draw(root, data, state)
  const focused = root.getRootNode().activeElement?.dataset?.name
  const pair = make("div", "masks")
  pair.append(mask(data, state, "Reading forwards: row i sees up to i", (row, column) => column <= row, null))
  const sees = (row, column) => column > row || (row === data.tokens.length - 1 && column === row)
  pair.append(mask(data, state, "Counter-causal: row i sees only what comes after", sees, again))
  const stages = make("div", "stages")
  for (let stage = 0; stage <= state.stage; stage++) stages.append(part(data, data.rows[state.row], stage))
  const bar = make("div", "controls")
  const button = (name, label, disabled, act) => {
    const made = say("button", label)
    made.dataset.name = name
    made.disabled = disabled
    made.onclick = () => {
      act()
      again()
    }
    bar.append(made)
  }
  button("back", "Back", state.stage === 0, () => state.stage--)
  button("next", "Next stage", state.stage === STAGES - 1, () => state.stage++)
  button("row", "Next row", false, () => (state.row = (state.row + 1) % data.tokens.length))
  bar.append(say("span", `Row of “${data.tokens[state.row]}”, stage ${state.stage + 1} of ${STAGES}`))
  stages.setAttribute("aria-live", "polite")
  root.replaceChildren(pair, bar, stages)
  if (focused) root.querySelector(`[data-name="${focused}"]:not(:disabled)`)?.focus()
}

function mask(data, state, title, sees, choose) {
  const figure = make("figure", "")
  const table = make("table", "")
  const head = make("tr", "")
  head.append(make("th", ""))
  for (const token of data.tokens) head.append(say("th", token))
  table.append(head)
  data.tokens.forEach((token, row) => {
    const line = make("tr", row === state.row ? "current" : "")
    const name = make("th", "")
    if (choose) {
      const button = say("button", token)
      button.dataset.name = `row-${row}`
      button.setAttribute("aria-pressed", String(row === state.row))
      button.onclick = () => {
        state.row = row
        choose()
      }
      name.append(button)
    } else name.textContent = token
    line.append(name)
    data.tokens.forEach((_, column) => {
      const cell = say("td", sees(row, column) ? "●" : "")
      cell.setAttribute("aria-label", sees(row, column) ? "sees" : "does not see")
      if (sees(row, column)) cell.className = "seen"
      line.append(cell)
    })
    table.append(line)
  })
  figure.append(say("figcaption", title), table)
  return figure
}

function part(data, row, stage) {
  const own = data.words[row.own]
  const seen = row.seen.map((at) => data.tokens[at])
  const box = make("section", "")
  const last = row.seen[0] === row.row
  if (stage === 0) {
    box.append(say("h6", "1. Who is seen"))
    box.append(
      say("p", last ? `“${own}” is the last token: nothing comes after, so it sees itself, and is protected.` : `“${own}” sees ${seen.map((word) => `“${word}”`).join(", ")}: what comes after it, and not itself.`),
    )
  } else if (stage === 1) {
    box.append(say("h6", "2. How well each fits"))
    box.append(say("p", `Query of “${own}” times each key, divided by √${data.size}, then softmax. The weights add up to 1.`))
    box.append(bars(seen.map((word, at) => [word, row.weights[at], `${vector(data.vectors[data.words.indexOf(word)])} → ${fixed(row.scores[at])} → ${fixed(row.weights[at])}`])))
  } else if (stage === 2) {
    box.append(say("h6", "3. What they say together"))
    box.append(say("p", `Their values, weighted: ${vector(row.mixed)}. Added to the row's own vector ${vector(data.vectors[row.own])}: ${vector(row.hidden)}.`))
  } else if (stage === 3) {
    box.append(say("h6", "4. What is expected here"))
    box.append(say("p", "That, times each word's vector, then softmax over all words."))
    box.append(bars(data.words.map((word, at) => [word, row.chances[at], `${fixed(row.logits[at])} → ${fixed(row.chances[at])}`, at === row.own])))
  } else {
    box.append(say("h6", "5. How surprising the token is"))
    const words = `P(“${own}”) = ${fixed(row.chances[row.own])}, so its surprise is 1 − ${fixed(row.chances[row.own])} = ${fixed(row.surprise)}.`
    const all = data.rows.slice(0, -1).map((one) => one.surprise)
    const place = all.filter((other) => other > row.surprise).length + 1
    const rank = last ? "It is protected, so it is not ranked." : `Of the ${all.length} tokens that are ranked it is number ${place}: the higher, the longer it stays.`
    box.append(say("p", `${words} ${rank}`))
  }
  return box
}

function bars(rows) {
  const list = make("ul", "bars")
  for (const [word, share, numbers, own] of rows) {
    const item = make("li", own ? "own" : "")
    const bar = make("span", "bar")
    bar.style.setProperty("--part", share)
    item.append(say("span", word), bar, say("span", numbers))
    list.append(item)
  }
  return list
}

function vector(values) {
  return `(${values.map(fixed).join(", ")})`
}

function fixed(value) {
  return value.toFixed(2)
}

function make(tag, className) {
  const made = document.createElement(tag)
  if (className) made.className = className
  return made
}

function say(tag, words) {
  const made = document.createElement(tag)
  made.textContent = words
  return made
}
