// The player: one state (which refresh, which token is pointed at, pinned, found) and the views that draw it. Knows
// what Python sends and wants back (player/__init__.py).

const SPEEDS = [1, 2, 4, 8, 16, 32] // refreshes a second
const REST = 350 // milliseconds without a change before the page is told
const ORDERS = { rank: "by score rank", position: "by position", "in place": "in place" }
const RAMPS = { "blue-red": "blue-red, as in the paper", "blue-yellow": "blue-yellow, for every eye" }
const KEYS = [
  ["space", "play or pause"],
  ["← →", "one refresh back or on; on the picture or the text, one cell or word"],
  ["↑ ↓", "on the picture, one refresh back or on"],
  ["Home End", "first and last refresh"],
  ["Enter", "pin the cell or word"],
  ["Esc", "unpin, forget the search, show all"],
  ["+ − 0", "zoom in, out, show all; or drag a box on the picture"],
  ["/", "find in the text"],
  ["o", "next order"],
  ["[ ]", "slower, faster"],
]

const players = new WeakMap()

export default function ({ data, parentElement, setStateValue }) {
  const root = parentElement.querySelector(".player")
  if (!root || !data) return
  let player = players.get(root)
  if (!player) {
    player = new Player(root)
    players.set(root, player)
    root.player = player
  }
  player.tell = (view) => setStateValue("view", view)
  player.receive(data)
}

class Player {
  constructor(root) {
    this.root = root
    this.state = { refresh: 0, order: "position", pin: -1, hover: -1, found: [], ramp: "blue-red" }
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)").matches
    this.speed = this.still ? 1 : 4
    this.matches = []
    this.map = new CacheMap(root.querySelector(".map"), this)
    this.reader = new TokenText(root.querySelector(".tokens"), this)
    this.wire()
  }

  find(selector) {
    return this.root.querySelector(selector)
  }

  // What Python sends

  receive(data) {
    const first = this.run !== data.run
    const asked = first || data.view.version !== this.version
    const fresh = first || this.content !== data.content
    const atEnd = this.model && this.state.refresh === this.model.rows - 1
    this.run = data.run
    this.version = data.view.version
    this.content = data.content
    this.group = data.group
    this.shared = data.shared
    this.tallest = data.rows
    this.ramps = data.ramps
    this.compact = data.parts === "map"
    this.root.dataset.parts = data.parts
    if (fresh) {
      this.model = new Model(data)
      this.model.scale = Math.max(1, data.last)
      this.summary = data.summary
      if (first) {
        this.stop()
        Object.assign(this.state, { pin: -1, hover: -1, found: [] })
        this.matches = []
        this.map.reset()
      }
      if (first || atEnd) this.state.refresh = Math.max(0, this.model.rows - 1)
    }
    if (asked) this.apply(data.view)
    this.theme()
    this.find(".title").textContent = data.title
    this.find(".lock").hidden = !this.group
    this.root.setAttribute("aria-label", data.title ? `Player of ${data.title}` : "Player of a run")
    if (fresh || asked) this.redraw(fresh)
    else this.map.draw() // the theme may be another
  }

  apply(view) {
    const { state, model } = this
    if (view.order) state.order = view.order
    if (view.ramp) state.ramp = view.ramp
    const last = Math.max(1, model.rows)
    state.refresh = Math.min(Math.max(1, view.refresh ?? last), last) - 1
    if (view.pin !== null) state.pin = view.pin < model.tokens ? view.pin : -1
    if (view.highlight) state.found = view.highlight
  }

  theme() {
    const style = getComputedStyle(this.root)
    const colour = (name, other) => style.getPropertyValue(name).trim() || other
    this.ink = colour("--st-text-color", "#1b2130")
    this.paper = colour("--st-background-color", "#ffffff")
    this.accent = colour("--st-primary-color", "#2456c9")
    this.font = colour("--st-font", "sans-serif")
    this.root.classList.toggle("dark", brightness(style.color) > 128)
    this.colours = ramp(this.ramps[this.state.ramp])
  }

  redraw(fresh) {
    const { model, state } = this
    const scrub = this.find(".scrub")
    scrub.max = Math.max(1, model.rows)
    scrub.disabled = model.rows < 2
    this.find(".ramps select").value = state.ramp
    for (const button of this.root.querySelectorAll(".orders button")) {
      button.setAttribute("aria-pressed", String(button.value === state.order))
    }
    this.legends()
    this.map.resize()
    if (!this.compact) {
      if (fresh) this.reader.fill()
      else this.reader.update()
    }
    this.shown()
    this.marked(state.pin)
    this.root.dataset.order = state.order
    this.root.dataset.drawn = this.content
  }

  // What changes

  step(row, { told = true, quiet = false } = {}) {
    const { model, state } = this
    const to = Math.min(Math.max(0, row), model.rows - 1)
    if (to < 0 || to === state.refresh) return
    state.refresh = to
    this.map.drawMarks()
    if (!this.compact) this.reader.update()
    this.shown()
    if (!this.timer || quiet) this.say(this.find(".sentence").textContent)
    if (told) this.share({ seen: model.seen[to] })
    if (told) this.changed()
  }

  pin(position, { told = true, scroll = true } = {}) {
    const { state } = this
    state.pin = position === state.pin ? -1 : position
    this.marked(scroll ? state.pin : -1)
    if (state.pin >= 0) this.say(`Pinned. ${this.described(state.pin, state.refresh)}`)
    if (told) this.share({ pin: state.pin })
    if (told) this.changed()
  }

  hover(position, { row = this.state.refresh, from = "", say = false, told = true } = {}) {
    const { state } = this
    if (position === state.hover && row === this.hoverRow) return
    state.hover = position
    this.hoverRow = row
    this.map.drawMarks()
    if (!this.compact) this.reader.mark(from === "map" || from === "keys" ? position : -1)
    this.pointed()
    if (say && position >= 0) this.say(this.described(position, row))
    if (told) this.share({ hover: position })
  }

  order(name) {
    this.state.order = name
    this.map.unzoom()
    this.redraw(false)
    this.changed()
  }

  ramp(name) {
    this.state.ramp = name
    this.theme()
    this.redraw(false)
    this.changed()
  }

  zoomed(zoomed) {
    this.find(".zooms .all").disabled = !zoomed
  }

  // Showing it

  shown() {
    const { model, state } = this
    const scrub = this.find(".scrub")
    const empty = model.rows === 0
    scrub.value = state.refresh + 1
    const row = state.refresh
    const words = empty ? "no refresh yet" : `refresh ${row + 1} of ${model.rows} · after ${thousands(model.seen[row])} tokens`
    this.find(".where").textContent = words
    scrub.setAttribute("aria-valuetext", words)
    this.find(".sentence").textContent = empty ? this.summary : this.sentence()
    this.map.marks.setAttribute("aria-label", `Picture of the cache, one row a refresh. ${this.summary} Arrow keys move over its cells.`)
    this.find(".tokens").setAttribute("aria-label", `The text. ${empty ? "" : this.sentence()} Arrow keys move over its words.`)
    if (!this.compact) this.legendOfText()
    if (!this.compact) drawLife(this.find(".life"), this)
    this.pointed()
  }

  sentence() {
    const { model } = this
    const row = this.state.refresh
    const [seen, held] = [model.seen[row], model.after[row]]
    const phase = model.phases[row] === "prefill" ? "while reading the prompt" : "while answering"
    const now = model.before[row] - held
    const lost = seen - held ? `and has lost ${thousands(seen - held)}${now ? `, ${thousands(now)} of them at this refresh` : ""}` : "and has lost none"
    return `Refresh ${row + 1}, ${phase}: the cache holds ${thousands(held)} of ${thousands(seen)} tokens seen ${lost}.`
  }

  marked(scroll) {
    this.map.drawMarks()
    if (this.compact) return
    this.reader.mark(scroll)
    drawLife(this.find(".life"), this)
    this.pointed()
  }

  pointed() {
    const { state } = this
    const position = state.hover >= 0 ? state.hover : state.pin
    const row = state.hover >= 0 ? (this.hoverRow ?? state.refresh) : state.refresh
    const words = position >= 0 ? this.described(position, row) : "Point at a cell or a word; click to pin it."
    this.find(".pointed").textContent = words
  }

  described(position, row) {
    const { model } = this
    const parts = [quoted(model.texts[position] ?? ""), `position ${thousands(position)}`]
    if (!model.rows || position >= model.seen[row]) return [...parts, "not read yet"].join(" · ")
    if (row !== this.state.refresh) parts.push(`at refresh ${row + 1}`)
    const lost = model.lostAt[position]
    const kept = model.columnOf("position", row, position) >= 0
    const why = model.protection(row, position)
    parts.push(kept ? `kept${why ? ` (${why})` : ""}` : `evicted at refresh ${lost + 1}`)
    const { rank, of } = model.rank(row, position)
    if (rank) parts.push(`score ${number(model.scores[model.entry(row, position)])}, rank ${rank} of ${of}`)
    return parts.join(" · ")
  }

  legends() {
    const bar = element("span", "ramp")
    bar.style.background = `linear-gradient(90deg, ${this.ramps[this.state.ramp].join(", ")})`
    const scale = element("span", "")
    scale.append("position 0", bar, thousands(this.model.scale))
    const items = [text("span", "left: tokens seen"), scale]
    if (!this.compact) items.push(text("span", "pinned", "framed"), text("span", "pale rows: still to come"))
    this.find(".mapkey").replaceChildren(...items)
  }

  legendOfText() {
    const { model, state } = this
    const score = element("span", "")
    if (this.reader.shades?.size) score.append("score: low", element("span", "ramp"), "high")
    else score.append("not scored at this refresh")
    const items = [score, text("s", "evicted"), text("span", "not read yet", "pale"), text("span", "protected", "under")]
    if (model.answer < model.tokens) items.push(text("span", "the answer starts", "bar"))
    if (state.found.length) items.push(text("span", "found", "foundkey"))
    this.find(".textkey").replaceChildren(...items)
  }

  say(words) {
    this.find(".spoken").textContent = words
  }

  // Playing

  play() {
    if (this.timer) return this.stop()
    if (this.state.refresh >= this.model.rows - 1) this.step(0)
    const tick = () => {
      this.step(this.state.refresh + 1)
      if (this.state.refresh >= this.model.rows - 1) this.stop()
    }
    this.timer = setInterval(tick, 1000 / this.speed)
    this.playing(true)
  }

  stop() {
    if (!this.timer) return
    clearInterval(this.timer)
    this.timer = null
    this.playing(false)
    if (!this.compact) this.reader.update()
    this.say(this.find(".sentence").textContent)
    this.changed()
  }

  playing(on) {
    const button = this.find(".play")
    button.classList.toggle("on", on)
    button.setAttribute("aria-label", on ? "Pause" : "Play")
  }

  faster(by) {
    const at = Math.min(Math.max(0, SPEEDS.indexOf(this.speed) + by), SPEEDS.length - 1)
    this.speed = SPEEDS[at]
    this.find(".speed select").value = this.speed
    if (!this.timer) return
    clearInterval(this.timer)
    this.timer = null
    this.play()
  }

  // Searching

  search(words) {
    this.matches = this.model.find(words)
    this.match = 0
    this.asked = words
    this.showMatch()
  }

  showMatch(by = 0) {
    const { model, state, matches } = this
    const box = this.find(".finding")
    box.hidden = !this.asked
    const button = box.querySelector("button")
    if (!matches.length) {
      state.found = []
      button.hidden = true
      if (this.asked) this.answer(`${quoted(this.asked)} is not in this text.`)
      this.marked(-1)
      return
    }
    this.match = (this.match + by + matches.length) % matches.length
    const [first, last] = matches[this.match]
    state.found = [first, last]
    state.pin = first
    const lost = []
    for (let position = first; position <= last; position++) if (model.lostAt[position] >= 0) lost.push(model.lostAt[position])
    const which = matches.length > 1 ? `Match ${this.match + 1} of ${matches.length}` : "One match"
    const size = last - first + 1
    const row = Math.min(...lost)
    button.hidden = !lost.length
    button.onclick = () => this.step(row)
    let fate = "still in the cache after the last refresh"
    if (lost.length === size) fate = `lost at refresh ${row + 1}, after ${thousands(model.seen[row])} tokens`
    else if (lost.length) fate = `${lost.length} of its ${size} tokens lost, the first at refresh ${row + 1}, after ${thousands(model.seen[row])} tokens`
    else if (!model.rows || first >= model.seen.at(-1)) fate = "read after the last refresh, so still there"
    this.answer(`${which}, position ${thousands(first)}: ${fate}.`)
    this.marked(first)
    this.legendOfText()
    this.share({ pin: first })
    this.changed()
  }

  answer(words) {
    this.find(".finding span").textContent = words
    this.say(words)
  }

  // Other players, and the page

  share(what) {
    if (!this.group || !this.find(".lock input").checked) return
    document.dispatchEvent(new CustomEvent("ccviz-player", { detail: { group: this.group, from: this, ...what } }))
  }

  follow({ group, from, seen, pin, hover }) {
    const { model, state } = this
    if (from === this || group !== this.group || !model || !this.find(".lock input").checked) return
    if (seen !== undefined) {
      let row = 0
      while (row + 1 < model.rows && model.seen[row + 1] <= seen) row++
      this.step(row, { told: false, quiet: true })
    }
    const ours = (position) => (position < this.shared ? position : -1) // what lies after may be other words
    if (pin !== undefined && ours(pin) !== state.pin) {
      state.pin = ours(pin)
      this.marked(state.pin)
    }
    if (hover !== undefined) this.hover(ours(hover), { told: false, from: "map" })
  }

  changed() {
    clearTimeout(this.resting)
    if (this.timer) return
    this.resting = setTimeout(() => {
      const { refresh, order, pin, ramp } = this.state
      const last = this.model.rows - 1
      const view = { run: this.run, refresh: refresh === last ? null : refresh + 1, order, pin, ramp }
      const said = JSON.stringify(view)
      if (said === this.said) return
      this.said = said
      this.tell(view)
    }, REST)
  }

  // Buttons and keys

  wire() {
    const on = (selector, kind, act) => this.find(selector).addEventListener(kind, act)
    on(".back", "click", () => this.step(this.state.refresh - 1))
    on(".next", "click", () => this.step(this.state.refresh + 1))
    on(".play", "click", () => this.play())
    on(".scrub", "input", (event) => this.step(Number(event.target.value) - 1))
    on(".zooms .in", "click", () => this.map.zoomBy(0.5))
    on(".zooms .out", "click", () => this.map.zoomBy(2))
    on(".zooms .all", "click", () => this.map.unzoom())
    on(".search input", "input", (event) => this.search(event.target.value))
    on(".search .before", "click", () => this.showMatch(-1))
    on(".search .after", "click", () => this.showMatch(1))
    on(".search input", "keydown", (event) => {
      if (event.key === "Enter") this.showMatch(event.shiftKey ? -1 : 1)
    })
    for (const [name, title] of Object.entries(ORDERS)) {
      const button = text("button", title)
      button.value = name
      button.onclick = () => this.order(name)
      this.find(".orders").append(button)
    }
    const choose = (selector, choices, act) => {
      const select = this.find(selector)
      for (const [value, title] of choices) {
        const option = text("option", title)
        option.value = value
        select.append(option)
      }
      select.onchange = () => act(select.value)
      return select
    }
    choose(".ramps select", Object.entries(RAMPS), (name) => this.ramp(name))
    const speeds = SPEEDS.map((speed) => [speed, `${speed} a second`])
    choose(".speed select", speeds, (value) => this.faster(SPEEDS.indexOf(Number(value)) - SPEEDS.indexOf(this.speed)))
    this.find(".speed select").value = this.speed
    for (const [keys, does] of KEYS) this.find(".keys dl").append(text("dt", keys), text("dd", does))
    this.find(".zooms .all").disabled = true
    this.root.addEventListener("keydown", (event) => this.key(event))
    const heard = (event) => {
      if (this.root.isConnected) this.follow(event.detail)
      else document.removeEventListener("ccviz-player", heard)
    }
    document.addEventListener("ccviz-player", heard)
  }

  key(event) {
    const { target } = event
    if (event.ctrlKey || event.metaKey || event.altKey) return
    const typing = target.matches("input[type=search], select")
    if (event.key === "Escape") {
      this.escape()
    } else if (typing) {
      event.stopPropagation() // a letter typed here is no shortcut of the page
      return
    } else if (event.key === " ") {
      if (target.matches("button, summary, input[type=checkbox]")) return
      this.play()
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (target.matches(".scrub")) return
      this.step(this.state.refresh + (event.key === "ArrowLeft" ? -1 : 1))
    } else if (event.key === "Home") this.step(0)
    else if (event.key === "End") this.step(this.model.rows - 1)
    else if (event.key === "[") this.faster(-1)
    else if (event.key === "]") this.faster(1)
    else if (this.compact) return
    else if (event.key === "/") this.find(".search input").focus()
    else if (event.key === "+" || event.key === "=") this.map.zoomBy(0.5)
    else if (event.key === "-") this.map.zoomBy(2)
    else if (event.key === "0") this.map.unzoom()
    else if (event.key === "o") {
      const names = Object.keys(ORDERS)
      this.order(names[(names.indexOf(this.state.order) + 1) % names.length])
    } else return
    event.preventDefault()
    event.stopPropagation()
  }

  escape() {
    this.state.hover = -1
    if (this.asked) {
      this.asked = this.find(".search input").value = ""
      this.search("")
    }
    if (this.map.zoom) this.map.unzoom()
    if (this.state.pin >= 0) this.pin(this.state.pin)
    this.marked(-1)
  }
}

// 256 colours between the stops of a ramp, as the pixels of an image want them.
function ramp(stops) {
  const parts = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)))
  return Uint32Array.from({ length: 256 }, (_, at) => {
    const place = (at / 255) * (parts.length - 1)
    const low = Math.min(Math.floor(place), parts.length - 2)
    const mixed = parts[low].map((value, channel) => value + (place - low) * (parts[low + 1][channel] - value))
    return 0xff000000 | (Math.round(mixed[2]) << 16) | (Math.round(mixed[1]) << 8) | Math.round(mixed[0])
  })
}

function brightness(colour) {
  const parts = colour.match(/[\d.]+/g).map(Number)
  return (parts[0] + parts[1] + parts[2]) / 3
}

function thousands(value) {
  return value.toLocaleString("en")
}
