// The text, a span a token, each drawn as what has become of it. Blocks of some hundred tokens become spans only while
// they are near what is visible. Token texts are inserted with textContent only.

const BLOCK = 160 // tokens; a block ends after a line where it can
const READABLE = 120 // milliseconds
const LINE = 27 // pixels, to guess the height of a block that was never drawn
const NEAR = "250px"

class TokenText {
  constructor(root, player) {
    this.root = root
    this.player = player
    this.blocks = []
    this.shown = { hover: -1, pin: -1, found: [] }
    this.observer = new IntersectionObserver((changes) => this.visible(changes), { root, rootMargin: NEAR })
    root.addEventListener("pointerover", (event) => {
      const position = positionOf(event)
      if (position >= 0) player.hover(position, { from: "text" })
    })
    root.addEventListener("pointerleave", () => player.hover(-1))
    root.addEventListener("click", (event) => {
      const position = positionOf(event)
      if (position >= 0) player.pin(position)
    })
    root.addEventListener("keydown", (event) => this.key(event))
  }

  get model() {
    return this.player.model
  }

  // Another trace, or more of the same one.
  fill() {
    const old = this.blocks
    const cuts = blocksOf(this.model.texts)
    const same = (block, at) => {
      const before = old[at]
      return before?.start === block.start && before.stop === block.stop && before.texts === block.texts
    }
    const fresh = cuts.map(([start, stop]) => {
      const texts = this.model.texts.slice(start, stop).join("\u0000")
      return { start, stop, texts, element: null, spans: null }
    })
    let kept = 0
    while (kept < fresh.length && same(fresh[kept], kept)) kept++
    for (const block of old.slice(kept)) {
      this.observer.unobserve(block.element)
      block.element.remove()
    }
    this.blocks = [...old.slice(0, kept), ...fresh.slice(kept)]
    const line = Math.max(20, (this.root.clientWidth || 600) / 8)
    for (const block of this.blocks.slice(kept)) {
      block.element = document.createElement("div")
      block.element.className = "block"
      const lines = block.texts.split("\n").reduce((sum, part) => sum + 1 + Math.floor(part.length / line), 0)
      block.element.style.height = `${lines * LINE}px`
      block.element.block = block
      this.root.append(block.element)
      this.observer.observe(block.element)
    }
    this.updated = 0 // at once: what there was may be of fewer tokens
    this.update()
  }

  visible(changes) {
    for (const change of changes) {
      const { block } = change.target
      if (change.isIntersecting) this.build(block)
      else if (block.spans) {
        block.element.style.height = `${block.element.offsetHeight}px`
        block.element.replaceChildren()
        block.spans = null
      }
    }
  }

  build(block) {
    if (block.spans) return
    block.spans = this.model.texts.slice(block.start, block.stop).map((text, at) => {
      const span = document.createElement("span")
      span.textContent = text.replace(/\n/g, "⏎\n")
      span.position = block.start + at
      span.dataset.position = span.position
      return span
    })
    block.element.style.height = ""
    block.element.replaceChildren(...block.spans)
    this.paint(block)
  }

  // Another refresh; while it plays, no more often than eyes can follow.
  update() {
    const now = performance.now()
    if (this.player.timer && now - this.updated < READABLE) return
    this.updated = now
    const row = this.player.state.refresh
    if (!this.model.rows) {
      this.states = new Uint8Array(this.model.tokens)
      this.shades = new Map()
    } else {
      this.states = this.model.states(row)
      this.shades = this.model.shades(row)
    }
    for (const block of this.blocks) if (block.spans) this.paint(block)
  }

  paint(block) {
    const { model } = this
    const row = this.player.state.refresh
    const names = ["u", "k", "e"]
    block.spans.forEach((span, at) => {
      const position = block.start + at
      let name = names[this.states[position]]
      if (this.states[position] === EVICTED && model.lostAt[position] === row) name += " now"
      if (this.states[position] === KEPT && model.rows && model.protection(row, position)) name += " safe"
      if (position === model.answer) name += " answer"
      const level = Math.round((this.shades.get(position) ?? 0) / 10) // ten levels: few change from step to step
      if (level) name += ` s${level}`
      name += this.marked(position)
      if (span.className !== name) span.className = name
    })
  }

  marked(position) {
    const { hover, pin, found } = this.shown
    let name = position === hover ? " here" : ""
    if (position === pin) name += " pinned"
    if (found.length && position >= found[0] && position <= found[1]) name += " found"
    return name
  }

  // What is pointed at, pinned and found
  mark(scroll) {
    const { hover, pin, found } = this.player.state
    const before = this.shown
    this.shown = { hover, pin, found }
    const touched = new Set([before.hover, before.pin, hover, pin])
    for (const [first, last] of [before.found, found].filter((span) => span.length)) {
      for (let position = first; position <= last; position++) touched.add(position)
    }
    const marks = { here: hover, pinned: pin }
    for (const position of touched) {
      const span = position >= 0 && this.span(position)
      if (!span) continue
      for (const [name, marked] of Object.entries(marks)) span.classList.toggle(name, position === marked)
      span.classList.toggle("found", found.length > 0 && position >= found[0] && position <= found[1])
    }
    if (scroll >= 0) this.show(scroll)
  }

  block(position) {
    let [low, high] = [0, this.blocks.length - 1]
    while (low < high) {
      const middle = (low + high) >> 1
      if (this.blocks[middle].stop > position) high = middle
      else low = middle + 1
    }
    return this.blocks[low]
  }

  span(position) {
    const block = this.block(position)
    return block?.spans?.[position - block.start]
  }

  // Bring a token into view, without moving the page.
  show(position) {
    const block = this.block(position)
    if (!block) return
    this.build(block)
    const span = this.span(position)
    const frame = this.root.getBoundingClientRect()
    const place = span.getBoundingClientRect()
    if (place.top >= frame.top && place.bottom <= frame.bottom) return
    this.root.scrollTop += place.top - frame.top - frame.height / 2
  }

  key(event) {
    const { state } = this.player
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }
    if (event.ctrlKey || event.metaKey || event.altKey) return
    if (moves[event.key]) {
      const from = state.hover >= 0 ? state.hover : state.pin
      const to = Math.min(Math.max(0, from + moves[event.key]), this.model.tokens - 1)
      this.player.hover(to, { from: "keys", say: true })
    } else if ((event.key === "Enter" || event.key === " ") && state.hover >= 0) this.player.pin(state.hover)
    else return
    event.preventDefault()
    event.stopPropagation()
  }
}

function positionOf(event) {
  const position = event.target.position
  return position === undefined ? -1 : position
}

// Blocks [start, stop) of about BLOCK tokens, which end with a line if one ends before twice as many.
function blocksOf(texts) {
  const blocks = []
  let start = 0
  for (let at = 0; at < texts.length; at++) {
    const size = at + 1 - start
    if ((size >= BLOCK && texts[at].endsWith("\n")) || size >= 2 * BLOCK) {
      blocks.push([start, at + 1])
      start = at + 1
    }
  }
  if (start < texts.length) blocks.push([start, texts.length])
  return blocks
}
