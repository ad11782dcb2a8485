"use strict";
// The panel that a row opens: next to the table on a wide screen, over it on a phone.
(() => {
  const { make } = report;
  let dialog, title, content, grid, shown;

  function build() {
    title = make("p", "panel-title");
    content = make("div", "panel-content");
    Object.assign(content, { tabIndex: -1, autofocus: true });  // else the first button gets the focus, and its ring
    const buttons = [["Previous", "‹", () => step(-1)], ["Next", "›", () => step(1)], ["Close", "×", () => dialog.close()]];
    const bar = make("div", "panel-bar", title, buttons.map(([label, sign, work]) => {
      const button = make("button", label.toLowerCase(), sign);
      button.type = "button";
      button.setAttribute("aria-label", label);
      button.addEventListener("click", work);
      return button;
    }));
    dialog = make("dialog", "panel", bar, content);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (way && !event.target.matches("input, select, textarea")) step(way);
    });
    dialog.addEventListener("close", forget);
    document.body.append(dialog);
  }

  /** A link's row, followed between the closing and this event that tells of it, keeps its address. */
  function forget() {
    if (!dialog.open && location.hash === shown) history.replaceState(null, "", location.pathname + location.search);
  }

  function step(way) {
    const i = grid.next(way);
    if (i !== null) grid.open(i);
  }

  /** Shows `node` for row i of a grid. */
  report.panel = (from, i, node) => {
    if (!dialog) build();
    grid = from;
    const place = from.found.indexOf(i);
    title.textContent = place < 0 ? "" : `${(place + 1).toLocaleString("en-US")} of ${from.found.length.toLocaleString("en-US")}`;
    dialog.querySelector(".previous").disabled = from.next(-1) === null;
    dialog.querySelector(".next").disabled = from.next(1) === null;
    content.replaceChildren(node);
    content.scrollTop = 0;
    shown = `#${from.name}=${i}`;
    history.replaceState(null, "", shown);
    if (!dialog.open) dialog.showModal();
  };
})();
