// The images that this browser has generated: links with small pictures, which no server keeps.
const KEY = "arimage-history", MOST = 24;

function read() {
  try {
    const made = JSON.parse(localStorage.getItem(KEY)) ?? [];
    return made.filter(({link, picture}) => link.startsWith("?") && picture.startsWith("data:image/"));
  } catch {
    return [];
  }
}

function write(made) {
  // Without storage, such as in a private window, there is no history.
  try { localStorage.setItem(KEY, JSON.stringify(made)); } catch {}
  show();
}

function show() {
  const made = read();
  const links = made.map(({link, picture}) => {
    const settings = new URLSearchParams(link), shown = document.createElement("a"), image = new Image();
    shown.href = link;
    shown.title = settings.get("prompt") ?? `class ${settings.get("class_label")}`;
    Object.assign(image, {src: picture, alt: shown.title});
    shown.append(image);
    return shown;
  });
  const about = document.createElement("p"), clear = document.createElement("button");
  about.className = "faint";
  about.append("Made in this browser: click one to open its settings. ", clear);
  clear.append("Clear");
  element.replaceChildren(...(made.length ? [about, ...links] : []));
}

element.addEventListener("click", (event) => {
  const {target} = event, shown = target.closest("a");
  if (target.closest("button")) write([]);
  if (shown && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    trigger("click", {link: shown.search});
  }
});
addEventListener("arimage-made", ({detail}) => {
  write([detail, ...read().filter(({link}) => link !== detail.link)].slice(0, MOST));
});
// Another window has generated an image.
addEventListener("storage", show);
show();
