// Tokens to choose among, in the order of the text: buttons with their text as text. Once revealed, each says whether
// it was kept and whether it had been chosen.

const picked = new WeakMap()

export default function ({ data, parentElement, setStateValue }) {
  const root = parentElement.querySelector(".picker")
  if (!root || !data) return
  let chosen = picked.get(root)
  if (!chosen || chosen.of !== data.of) {
    chosen = { of: data.of, positions: new Set(data.chosen) }
    picked.set(root, chosen)
  }
  const { positions } = chosen
  const count = document.createElement("p")
  const tell = () => {
    count.textContent = data.revealed ? "" : `${positions.size} of ${data.most} chosen`
  }
  const line = document.createElement("div")
  line.className = "line"
  line.setAttribute("role", "group")
  line.setAttribute("aria-label", "Tokens to choose among")
  data.tokens.forEach(({ position, text, kept }) => {
    const button = document.createElement("button")
    button.textContent = text.replace(/\n/g, "⏎").replace(/ /g, "·")
    button.dataset.position = position
    const show = () => button.setAttribute("aria-pressed", String(positions.has(position)))
    show()
    if (data.revealed) {
      button.disabled = true
      const right = kept === positions.has(position)
      button.className = `${kept ? "kept" : "evicted"} ${right ? "right" : "wrong"}`
      button.title = `${kept ? "survived" : "evicted"}; you ${positions.has(position) ? "chose it" : "did not choose it"}`
      button.setAttribute("aria-label", `${text}: ${button.title}`)
    }
    button.onclick = () => {
      if (positions.has(position)) positions.delete(position)
      else if (positions.size < data.most) positions.add(position)
      else {
        count.textContent = `${data.most} are chosen already: take one back first.`
        return
      }
      show()
      tell()
      setStateValue("chosen", { of: data.of, positions: [...positions] })
    }
    line.append(button)
    if (text.endsWith("\n")) line.append(document.createElement("br"))
  })
  tell()
  count.setAttribute("aria-live", "polite")
  const parts = [line, count]
  if (data.revealed) {
    const legend = document.createElement("p")
    legend.className = "legend"
    for (const [name, words] of [["kept", "survived"], ["evicted", "evicted"], ["mark", "your choice"]]) {
      const part = document.createElement("span")
      part.className = name
      part.textContent = words
      legend.append(part)
    }
    parts.splice(1, 1, legend)
  }
  root.replaceChildren(...parts)
}
