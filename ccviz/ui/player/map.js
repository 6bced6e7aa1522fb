// The heatmap: one row a refresh, one column a slot, the colour the token's position. Two canvases lie on each other:
// cells below, drawn only when what they show changes, and marks above, drawn at every step. What is drawn costs as
// much as there are pixels, however long the trace is.

const GUTTER = 44 // pixels left of the cells, for the number of tokens seen
const ROW_HEIGHT = 22 // at most
const MAP_HEIGHT = 384 // at most
const SMALL_HEIGHT = 160 // at most, where there is only the map
const LEAST_HEIGHT = 14
const GAP_FROM = 6 // pixels: cells at least this wide are set apart

class CacheMap {
  constructor(root, player) {
    this.player = player
    this.root = root
    this.cells = root.querySelector(".cells")
    this.marks = root.querySelector(".marks")
    this.box = null // being dragged: [x0, y0, x1, y1] in pixels
    this.cursor = null // {row, column}: where the keyboard is
    this.reset()
    const { marks } = this
    marks.addEventListener("pointermove", (event) => this.moved(event))
    marks.addEventListener("pointerleave", () => !this.box && player.hover(-1))
    marks.addEventListener("pointerdown", (event) => this.pressed(event))
    marks.addEventListener("pointerup", (event) => this.released(event))
    marks.addEventListener("pointercancel", () => {
      this.box = null
      this.drawMarks()
    })
    marks.addEventListener("keydown", (event) => this.key(event))
    marks.addEventListener("focus", () => this.drawMarks())
    marks.addEventListener("blur", () => this.drawMarks())
    new ResizeObserver(() => this.resize()).observe(root)
  }

  get model() {
    return this.player.model
  }

  get order() {
    return this.player.state.order
  }

  reset() {
    this.zoom = null // or {c0, c1, r0, r1}, cells shown, ends excluded
  }

  get view() {
    return this.zoom ?? { c0: 0, c1: this.model ? this.model.width(this.order) : 1, r0: 0, r1: this.model?.rows ?? 1 }
  }

  resize() {
    if (!this.model || !this.root.clientWidth) return
    const shown = this.zoom ? this.zoom.r1 - this.zoom.r0 : this.model.rows
    const most = this.zoom ? shown : Math.max(shown, this.player.tallest)
    const row = Math.min(ROW_HEIGHT, (this.player.compact ? SMALL_HEIGHT : MAP_HEIGHT) / most)
    this.width = Math.max(40, this.root.clientWidth - GUTTER)
    this.height = Math.max(Math.round(row * shown), LEAST_HEIGHT)
    this.ratio = window.devicePixelRatio || 1
    for (const canvas of [this.cells, this.marks]) {
      canvas.style.width = `${this.width + GUTTER}px`
      canvas.style.height = `${this.height}px`
      canvas.width = Math.round((this.width + GUTTER) * this.ratio)
      canvas.height = Math.round(this.height * this.ratio)
    }
    this.root.style.height = `${this.height}px`
    this.draw()
  }

  draw() {
    if (!this.model?.rows || !this.width) return
    this.drawCells()
    this.drawMarks()
  }

  // Cells

  drawCells() {
    const { c0, c1, r0, r1 } = this.view
    const context = this.cells.getContext("2d")
    const left = Math.round(GUTTER * this.ratio)
    const [width, height] = [this.cells.width - left, this.cells.height]
    const image = new ImageData(width, height)
    const pixels = new Uint32Array(image.data.buffer)
    const across = steps(width, c0, c1, this.ratio)
    const down = steps(height, r0, r1, this.ratio)
    const colours = this.player.colours
    const scale = 255 / this.model.scale
    for (let y = 0; y < height; y++) {
      const row = down[y]
      if (row < 0) continue
      if (y && row === down[y - 1]) {
        pixels.copyWithin(y * width, (y - 1) * width, y * width)
        continue
      }
      const columns = this.model.columns(this.order, row)
      for (let x = 0; x < width; x++) {
        const column = across[x]
        if (column < 0 || column >= columns.length || columns[column] < 0) continue
        pixels[y * width + x] = colours[Math.min(255, (columns[column] * scale) | 0)]
      }
    }
    context.clearRect(0, 0, this.cells.width, height)
    context.putImageData(image, left, 0)
    this.drawLabels(context, r0, r1)
  }

  drawLabels(context, r0, r1) {
    context.save()
    context.scale(this.ratio, this.ratio)
    context.fillStyle = this.player.ink
    context.globalAlpha = 0.75
    context.font = `11px ${this.player.font}`
    context.textAlign = "right"
    context.textBaseline = "middle"
    const row = this.height / (r1 - r0)
    const every = Math.max(1, Math.ceil(16 / row))
    for (let at = r0; at < r1; at += every) {
      context.fillText(this.model.seen[at].toLocaleString("en"), GUTTER - 6, Math.max(7, (at - r0 + 0.5) * row))
    }
    context.restore()
  }

  // Marks: the current refresh, what comes after it, the tokens pointed at, pinned and found

  drawMarks() {
    if (!this.model?.rows || !this.width) return
    const context = this.marks.getContext("2d")
    const { c0, c1, r0, r1 } = this.view
    const { state } = this.player
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0)
    context.clearRect(0, 0, this.width + GUTTER, this.height)
    const [cell, row] = [this.width / (c1 - c0), this.height / (r1 - r0)]
    const after = (state.refresh + 1 - r0) * row
    if (after < this.height) {
      context.globalAlpha = 0.62
      context.fillStyle = this.player.paper
      context.fillRect(GUTTER, Math.max(0, after), this.width, this.height - Math.max(0, after))
      context.globalAlpha = 1
    }
    const outline = (position, thick) => {
      context.lineWidth = thick
      for (let at = r0; at < r1; at++) {
        const column = this.model.columnOf(this.order, at, position)
        if (column < c0 || column >= c1) continue
        this.frame(context, (column - c0) * cell, (at - r0) * row, cell, row)
      }
    }
    context.strokeStyle = this.player.ink
    if (state.pin >= 0) outline(state.pin, 2)
    if (state.hover >= 0 && state.hover !== state.pin) outline(state.hover, 1.25)
    context.strokeStyle = this.player.accent
    context.lineWidth = 2
    context.strokeRect(GUTTER + 1, after - row + 1, this.width - 2, Math.max(1, row - 2))
    if (this.cursor && this.marks.matches(":focus-visible")) {
      context.setLineDash([3, 2])
      context.strokeStyle = this.player.ink
      this.frame(context, (this.cursor.column - c0) * cell, (this.cursor.row - r0) * row, cell, row, 3)
      context.setLineDash([])
    }
    if (this.box) {
      const [x0, y0, x1, y1] = this.box
      context.strokeStyle = this.player.accent
      context.lineWidth = 1.5
      context.strokeRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0))
    }
  }

  // A frame around a cell, never thinner than can be seen.
  frame(context, x, y, cell, row, grow = 0) {
    const width = Math.max(cell, 4) + 2 * grow
    const height = Math.max(row, 3) + 2 * grow
    context.strokeRect(GUTTER + x + cell / 2 - width / 2, y + row / 2 - height / 2, width, height)
  }

  // Pointing

  at(event) {
    const frame = this.marks.getBoundingClientRect()
    return [event.clientX - frame.left, event.clientY - frame.top]
  }

  cellAt(x, y) {
    const { c0, c1, r0, r1 } = this.view
    const column = c0 + Math.floor(((x - GUTTER) / this.width) * (c1 - c0))
    const row = r0 + Math.floor((y / this.height) * (r1 - r0))
    return { column, row, inside: x >= GUTTER && column < c1 && row >= r0 && row < r1 }
  }

  tokenIn({ row, column, inside }) {
    const columns = inside ? this.model.columns(this.order, row) : []
    return column < columns.length ? columns[column] : -1
  }

  moved(event) {
    if (!this.model?.rows) return
    const [x, y] = this.at(event)
    if (this.box) {
      this.box[2] = Math.min(Math.max(x, GUTTER), GUTTER + this.width)
      this.box[3] = Math.min(Math.max(y, 0), this.height)
      this.drawMarks()
      return
    }
    const cell = this.cellAt(x, y)
    this.player.hover(this.tokenIn(cell), { row: cell.row, from: "map" })
  }

  pressed(event) {
    if (event.button !== 0 || !this.model?.rows) return
    const [x, y] = this.at(event)
    if (!this.player.compact && event.pointerType !== "touch") {
      this.box = [x, y, x, y]
      this.marks.setPointerCapture(event.pointerId)
    } else this.choose(x, y)
  }

  released(event) {
    if (!this.box) return
    const [x0, y0, x1, y1] = this.box
    this.box = null
    if (Math.abs(x1 - x0) < 5 && Math.abs(y1 - y0) < 5) this.choose(...this.at(event))
    else this.zoomTo(x0, y0, x1, y1)
  }

  choose(x, y) {
    const cell = this.cellAt(x, y)
    if (cell.row < 0 || cell.row >= this.model.rows) return
    this.cursor = { row: cell.row, column: Math.max(0, cell.column) }
    this.player.step(cell.row)
    const position = this.tokenIn(cell)
    if (position >= 0) this.player.pin(position)
  }

  zoomTo(x0, y0, x1, y1) {
    const one = this.cellAt(Math.min(x0, x1), Math.min(y0, y1))
    const two = this.cellAt(Math.max(x0, x1) - 0.01, Math.max(y0, y1) - 0.01)
    this.zoomCells(one.column, two.column + 1, one.row, two.row + 1)
  }

  zoomCells(c0, c1, r0, r1) {
    const [columns, rows] = [this.model.width(this.order), this.model.rows]
    const clamped = (low, high, size, least) => {
      const count = Math.min(size, Math.max(least, high - low))
      const start = Math.min(Math.max(0, low), size - count)
      return [start, start + count]
    }
    const [a, b] = clamped(c0, c1, columns, 4)
    const [top, bottom] = clamped(r0, r1, rows, 1)
    this.zoom = a === 0 && b === columns && top === 0 && bottom === rows ? null : { c0: a, c1: b, r0: top, r1: bottom }
    this.player.zoomed(Boolean(this.zoom))
    this.resize()
  }

  // In or out around the cursor, the pinned token or the middle.
  zoomBy(factor) {
    const { c0, c1, r0, r1 } = this.view
    const here = this.cursor ?? { row: this.player.state.refresh, column: (c0 + c1) >> 1 }
    const around = (low, high, centre) => {
      const half = Math.max(1, ((high - low) * factor) / 2)
      return [Math.round(centre - half), Math.round(centre + half)]
    }
    this.zoomCells(...around(c0, c1, here.column), ...around(r0, r1, here.row))
  }

  unzoom() {
    this.zoom = null
    this.player.zoomed(false)
    this.resize()
  }

  // Keyboard: a cursor on the cells

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.model?.rows) return
    const { refresh } = this.player.state
    this.cursor ??= { row: refresh, column: 0 }
    const page = Math.max(1, Math.round((this.view.c1 - this.view.c0) / 10))
    const moves = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      PageUp: [0, -page],
      PageDown: [0, page],
    }
    if (moves[event.key]) {
      const [down, across] = moves[event.key]
      this.cursor.row = Math.min(Math.max(0, refresh + down), this.model.rows - 1)
      const size = this.model.columns(this.order, this.cursor.row).length
      this.cursor.column = Math.min(Math.max(0, this.cursor.column + across), Math.max(0, size - 1))
      if (down) this.player.step(this.cursor.row)
      const position = this.tokenIn({ ...this.cursor, inside: true })
      this.player.hover(position, { row: this.cursor.row, from: "map", say: true })
      this.showCursor()
    } else if (event.key === "Enter" || event.key === " ") {
      const position = this.tokenIn({ ...this.cursor, row: refresh, inside: true })
      if (position >= 0) this.player.pin(position)
    } else if (event.key === "+" || event.key === "=") this.zoomBy(0.5)
    else if (event.key === "-") this.zoomBy(2)
    else return
    event.preventDefault()
    event.stopPropagation()
  }

  showCursor() {
    const { c0, c1, r0, r1 } = this.view
    const { row, column } = this.cursor
    const shift = (low, high, at) => (at < low ? at - low : at >= high ? at - high + 1 : 0)
    const [across, down] = [shift(c0, c1, column), shift(r0, r1, row)]
    if (this.zoom && (across || down)) this.zoomCells(c0 + across, c1 + across, r0 + down, r1 + down)
    else this.drawMarks()
  }
}

// For each pixel the cell it shows, -1 in the gap after a cell that is wide enough to have one.
function steps(pixels, low, high, ratio) {
  const cells = new Int32Array(pixels)
  const size = pixels / (high - low)
  const gap = size >= GAP_FROM * ratio ? Math.round(ratio) : 0
  for (let at = 0; at < pixels; at++) {
    const cell = Math.min(high - 1, low + Math.floor(at / size))
    cells[at] = gap && at >= Math.round((cell - low + 1) * size) - gap ? -1 : cell
  }
  return cells
}
