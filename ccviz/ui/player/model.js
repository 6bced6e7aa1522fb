// What a trace says, decoded once and asked often. Knows the arrays that Python sends (player/__init__.py); knows
// nothing of pages and pixels. A row is a refresh; an entry is a token in the cache at a refresh.

const UNSEEN = 0
const KEPT = 1
const EVICTED = 2

function decoded(text, Kind) {
  const raw = atob(text)
  const bytes = new Uint8Array(raw.length)
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at)
  return new Kind(bytes.buffer)
}

class Model {
  constructor(data) {
    this.texts = data.texts
    this.answer = data.answer
    this.seen = data.seen
    this.before = data.before
    this.after = data.after
    this.phases = data.phases
    this.rows = data.seen.length
    this.tokens = data.texts.length
    this.protections = data.protections
    this.records = data.entries !== null // a full cache records none: it holds every token seen
    this.identity = Uint32Array.from({ length: this.tokens }, (_, position) => position)
    if (this.records) {
      this.starts = decoded(data.entries.starts, Uint32Array)
      this.positions = decoded(data.entries.positions, data.entries.wide ? Uint32Array : Uint16Array)
      this.marks = decoded(data.entries.marks, Uint8Array)
      this.scores = decoded(data.entries.scores, Float32Array)
    }
    this.expected = data.expected && {
      words: data.expected.words,
      ids: decoded(data.expected.ids, Uint32Array),
      chances: decoded(data.expected.chances, Float32Array),
      probability: decoded(data.expected.probability, Float32Array),
    }
    this.kept = new Array(this.rows)
    this.arranged = { rank: new Array(this.rows), "in place": null }
    this.limits = new Array(this.rows)
    this.lostAt = this.losses()
  }

  // The positions that a refresh left in the cache, ascending.
  survivors(row) {
    if (!this.records) return this.identity.subarray(0, this.seen[row])
    this.kept[row] ??= this.positions
      .subarray(this.starts[row], this.starts[row + 1])
      .filter((_, at) => this.marks[this.starts[row] + at] & 1)
    return this.kept[row]
  }

  // For each token the first refresh after which it was gone, -1 if there is none.
  losses() {
    const lost = new Int32Array(this.tokens).fill(-1)
    if (!this.records) return lost
    const held = new Int32Array(this.tokens).fill(-1)
    let before = this.identity.subarray(0, 0)
    for (let row = 0; row < this.rows; row++) {
      const now = this.survivors(row)
      for (const position of now) held[position] = row
      const check = (position) => {
        if (held[position] !== row && lost[position] < 0) lost[position] = row
      }
      before.forEach(check)
      for (let position = row ? this.seen[row - 1] : 0; position < this.seen[row]; position++) check(position)
      before = now
    }
    return lost
  }

  // What has become of every token after a refresh: UNSEEN, KEPT or EVICTED.
  states(row) {
    const states = new Uint8Array(this.tokens)
    states.fill(EVICTED, 0, this.seen[row])
    for (const position of this.survivors(row)) states[position] = KEPT
    return states
  }

  // The position in each column of a row, -1 where a column is empty.
  columns(order, row) {
    if (order === "position" || !this.records) return this.survivors(row)
    if (order === "in place") {
      this.arranged["in place"] ??= this.inPlace()
      return this.arranged["in place"][row]
    }
    this.arranged.rank[row] ??= this.byRank(row)
    return this.arranged.rank[row]
  }

  width(order) {
    let widest = 1
    for (let row = 0; row < this.rows; row++) {
      const columns = order === "in place" ? this.columns(order, row) : this.survivors(row)
      widest = Math.max(widest, columns.length)
    }
    return widest
  }

  byRank(row) {
    const [start, stop] = [this.starts[row], this.starts[row + 1]]
    const entries = []
    for (let entry = start; entry < stop; entry++) if (this.marks[entry] & 1) entries.push(entry)
    const worse = (entry) => (this.marks[entry] >> 1 ? -Infinity : -this.scores[entry])
    const last = (value) => (Number.isNaN(value) ? Infinity : value)
    entries.sort((a, b) => last(worse(a)) - last(worse(b)) || this.positions[a] - this.positions[b])
    return Uint32Array.from(entries, (entry) => this.positions[entry])
  }

  // A token keeps its column while it lives; a new one takes the first free one.
  inPlace() {
    const column = new Int32Array(this.tokens).fill(-1)
    const held = new Int32Array(this.tokens).fill(-1)
    const used = []
    const rows = []
    let before = this.identity.subarray(0, 0)
    for (let row = 0; row < this.rows; row++) {
      const now = this.survivors(row)
      for (const position of now) held[position] = row
      for (const position of before) {
        if (held[position] === row) continue
        used[column[position]] = false
        column[position] = -1
      }
      let free = 0
      let width = 0
      for (const position of now) {
        if (column[position] < 0) {
          while (used[free]) free++
          column[position] = free
          used[free] = true
        }
        width = Math.max(width, column[position] + 1)
      }
      const arranged = new Int32Array(width).fill(-1)
      for (const position of now) arranged[column[position]] = position
      rows.push(arranged)
      before = now
    }
    return rows
  }

  // Where a token stands in a row, -1 if it is not there.
  columnOf(order, row, position) {
    const columns = this.columns(order, row)
    if (order === "position" || !this.records) return found(columns, position)
    return columns.indexOf(position)
  }

  // The entry of a token at a refresh, survived or not; -1 if it was not in the cache.
  entry(row, position) {
    if (!this.records) return -1
    const [start, stop] = [this.starts[row], this.starts[row + 1]]
    const at = found(this.positions.subarray(start, stop), position)
    return at < 0 ? -1 : start + at
  }

  // 1 is best, among all that were scored at this refresh; ties go to the later one. 0 where it was not scored.
  rank(row, position) {
    const entry = this.entry(row, position)
    if (entry < 0 || Number.isNaN(this.scores[entry])) return { rank: 0, of: 0 }
    let better = 1
    let of = 0
    for (let other = this.starts[row]; other < this.starts[row + 1]; other++) {
      const difference = this.scores[other] - this.scores[entry]
      if (Number.isNaN(difference) && Number.isNaN(this.scores[other])) continue
      of++
      if (difference > 0 || (other > entry && this.scores[other] === this.scores[entry])) better++
    }
    return { rank: better, of }
  }

  // For each entry of a row, 0 (worst) to 100 (best) by rank; all 0 where nothing was scored.
  shades(row) {
    const shades = new Map()
    if (!this.records) return shades
    const scored = []
    for (let entry = this.starts[row]; entry < this.starts[row + 1]; entry++) {
      if (!Number.isNaN(this.scores[entry])) scored.push(entry)
    }
    scored.sort((a, b) => this.scores[b] - this.scores[a] || b - a)
    scored.forEach((entry, place) => shades.set(this.positions[entry], Math.round(100 * (1 - place / scored.length))))
    return shades
  }

  protection(row, position) {
    const entry = this.entry(row, position)
    return entry < 0 ? "" : this.protections[this.marks[entry] >> 1]
  }

  // The lowest score that still stayed at a refresh without being protected; NaN where nothing had to go.
  threshold(row) {
    if (this.limits[row] === undefined) {
      let lowest = Infinity
      let evicts = false
      for (let entry = this.starts[row]; entry < this.starts[row + 1]; entry++) {
        if (!(this.marks[entry] & 1)) evicts = true
        else if (!(this.marks[entry] >> 1) && this.scores[entry] < lowest) lowest = this.scores[entry]
      }
      this.limits[row] = evicts && lowest < Infinity ? lowest : NaN
    }
    return this.limits[row]
  }

  // A token's whole life.
  life(position) {
    const born = this.seen.findIndex((seen) => seen > position)
    const lost = this.lostAt[position]
    const steps = []
    if (this.records && born >= 0) {
      for (let row = born; row < this.rows; row++) {
        const entry = this.entry(row, position)
        if (entry < 0) continue
        steps.push({
          row,
          score: this.scores[entry],
          ...this.rank(row, position),
          threshold: this.threshold(row),
          kept: Boolean(this.marks[entry] & 1),
          protection: this.protections[this.marks[entry] >> 1],
        })
      }
    }
    return { born, lost, steps }
  }

  // What the future expected in a token's place at a refresh, or null where nothing was recorded.
  expectation(row, position) {
    const entry = this.expected ? this.entry(row, position) : -1
    if (entry < 0 || Number.isNaN(this.expected.probability[entry])) return null
    const count = this.expected.ids.length / this.positions.length
    const words = []
    for (let at = entry * count; at < (entry + 1) * count; at++) {
      words.push({ text: this.expected.words[this.expected.ids[at]], chance: this.expected.chances[at] })
    }
    return { probability: this.expected.probability[entry], words }
  }

  // Where a text occurs, as [first token, last token], whatever the case; at most `most` places.
  find(text, most = 1000) {
    const wanted = text.toLowerCase()
    if (!wanted) return []
    if (!this.folded) {
      const parts = this.texts.map((part) => part.toLowerCase())
      let length = 0
      this.ends = Uint32Array.from(parts, (part) => (length += part.length))
      this.folded = parts.join("")
    }
    const places = []
    for (let at = this.folded.indexOf(wanted); at >= 0 && places.length < most; ) {
      places.push([this.tokenAt(at), this.tokenAt(at + wanted.length - 1)])
      at = this.folded.indexOf(wanted, at + wanted.length)
    }
    return places
  }

  tokenAt(character) {
    let [low, high] = [0, this.tokens - 1]
    while (low < high) {
      const middle = (low + high) >> 1
      if (this.ends[middle] > character) high = middle
      else low = middle + 1
    }
    return low
  }
}

function found(sorted, value) {
  let [low, high] = [0, sorted.length - 1]
  while (low <= high) {
    const middle = (low + high) >> 1
    if (sorted[middle] === value) return middle
    if (sorted[middle] < value) low = middle + 1
    else high = middle - 1
  }
  return -1
}
