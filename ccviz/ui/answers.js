// Answers side by side, each with the first token that departs from the reference marked.
// Token texts are inserted with textContent only.

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".answers")
  if (!root || !data) return
  root.replaceChildren(...data.answers.map(card))
}

function card(answer) {
  const box = element("section", "card")
  const head = element("div", "head")
  head.append(element("h3", "", answer.title))
  if (answer.verdict) head.append(element("span", `verdict ${answer.right ? "right" : "wrong"}`, answer.verdict))
  const text = element("p", "text")
  text.append(answer.before)
  if (answer.departing) {
    const mark = element("mark", "", answer.departing.replace(/\n/g, "⏎"))
    mark.title = "the first token that departs from the full cache's answer"
    text.append(mark)
  }
  text.append(answer.after)
  if (!answer.before && !answer.departing && !answer.after) text.append("…")
  box.append(head, text, element("p", "note", answer.note))
  return box
}

function element(tag, className, text = "") {
  const made = document.createElement(tag)
  if (className) made.className = className
  made.textContent = text
  return made
}
