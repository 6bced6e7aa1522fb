// Files dropped anywhere on the page go to Python, but for those dropped on a field of its own.

const wired = new WeakSet()

export default function ({ parentElement, setTriggerValue }) {
  const sign = parentElement.querySelector(".drop")
  if (!sign) return
  sign.send = (files) => setTriggerValue("dropped", files)
  if (wired.has(sign)) return
  wired.add(sign)
  sign.textContent = "Drop to add to the library"
  const ours = (event) =>
    sign.isConnected &&
    event.dataTransfer?.types.includes("Files") &&
    !event.composedPath().some((part) => part.dataset?.testid?.startsWith("stFileUploader"))
  let leaving
  const over = (event) => {
    if (!ours(event)) return
    event.preventDefault()
    sign.hidden = false
    clearTimeout(leaving)
    leaving = setTimeout(() => (sign.hidden = true), 400) // no more of these events: the file has left the window
  }
  const drop = async (event) => {
    if (!ours(event)) return
    event.preventDefault()
    event.stopPropagation()
    sign.hidden = true
    const files = [...event.dataTransfer.files]
    sign.send(await Promise.all(files.map(read)))
  }
  const listeners = { dragenter: over, dragover: over, drop }
  for (const [kind, act] of Object.entries(listeners)) document.addEventListener(kind, act, true)
  const watch = new MutationObserver(() => {
    if (sign.isConnected) return
    watch.disconnect()
    for (const [kind, act] of Object.entries(listeners)) document.removeEventListener(kind, act, true)
  })
  watch.observe(document.body, { childList: true, subtree: true })
  sign.dataset.listens = "yes"
}

function read(file) {
  return new Promise((done) => {
    const reader = new FileReader()
    reader.onload = () => done({ name: file.name, data: reader.result.split(",")[1] ?? "" })
    reader.onerror = () => done({ name: file.name, data: "?" })
    reader.readAsDataURL(file)
  })
}
