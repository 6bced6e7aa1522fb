// Keys of a lesson, anywhere on the page but in a field or a part that has keys of its own. A presenter's clicker sends
// PageUp and PageDown.

const MEANS = {
  ArrowRight: "next",
  PageDown: "next",
  ArrowLeft: "back",
  PageUp: "back",
  Enter: "reveal",
  p: "present",
  Escape: "leave",
}
const wired = new WeakSet()

export default function ({ parentElement, setTriggerValue }) {
  const sign = parentElement.querySelector(".keys")
  if (!sign) return
  sign.send = (name) => setTriggerValue("pressed", name)
  if (wired.has(sign)) return
  wired.add(sign)
  const heard = (event) => {
    if (!sign.isConnected) {
      document.removeEventListener("keydown", heard)
      return
    }
    const name = MEANS[event.key]
    if (!name || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return
    const target = event.composedPath()[0]
    if (target instanceof Element && target.closest("input, textarea, select, [role=slider], [role=radio]")) return
    if (name === "reveal" && target instanceof Element && target.closest("button, a, summary")) return
    event.preventDefault()
    sign.send(name)
  }
  document.addEventListener("keydown", heard)
  sign.dataset.listens = "yes"
}
