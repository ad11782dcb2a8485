"use strict";
// The divergence map: order, axis, scrolling, pointing. Only the lines in sight are drawn in full; where they do not all
// fit, an overview above them holds every item.
(() => {
  const { make } = report;
  const { PARTS, legend, state, said, palette, paint, ratio, image } = report.picture;
  const LINE = { few: 14, many: 6 };  // px of an item
  const TALL = 420;  // px of the detail, at most
  const OVERVIEW = 132;  // px
  const SOON = 2000;  // items whose levels are unpacked at once, unseen

  class DivergenceMap {
    constructor(root) {
      this.root = root;
      this.rows = report.data("map").rows.map(([name, tokens, parts, first, row]) => ({ name, tokens, parts, first, row }));
      this.store = report.blocks("map");
      this.levels = new Array(this.rows.length).fill(null);
      this.width = this.rows.reduce((most, row) => Math.max(most, row.tokens), 1);  // tokens
      this.line = this.rows.length <= 30 ? LINE.few : LINE.many;
      this.tall = Math.min(TALL, this.rows.length * this.line);
      this.many = this.rows.length * this.line > TALL;
      this.current = null;
      this.build();
      this.order("parts");
      if (this.rows.length <= SOON) this.load();
      else new IntersectionObserver((entries, watcher) => {  // many are unpacked when the map comes into sight
        if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); this.load(); }
      }).observe(root);
      new ResizeObserver(() => this.draw()).observe(root);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    }

    build() {
      const sorts = make("select", "", make("option", "", "Items: earliest difference first"), make("option", "", "Items: in the task's order"));
      sorts.setAttribute("aria-label", "Order of the items");
      sorts.addEventListener("change", () => this.order(sorts.selectedIndex ? "given" : "parts"));
      this.axis = make("div", "map-axis");
      this.overview = make("canvas", "map-overview");
      this.frame = make("div", "map-frame");
      this.whole = make("div", "map-whole", this.overview, this.frame);
      this.whole.hidden = !this.many;
      this.canvas = make("canvas", "map-detail");
      this.space = make("div", "map-space", this.canvas);
      this.body = make("div", "map-body", this.space);
      this.body.tabIndex = 0;
      this.body.setAttribute("aria-label", "Divergence map: arrow keys move through the items, Enter opens one");
      this.readout = make("p", "map-readout", "\u00a0");
      this.readout.setAttribute("role", "status");
      this.root.replaceChildren(legend(this.rows.some((row) => row.parts !== null)), make("div", "tools", sorts, this.readout), this.axis, this.whole, this.body);
      this.body.style.height = `${this.tall}px`;
      this.space.style.height = `${this.rows.length * this.line}px`;
      this.body.addEventListener("scroll", () => requestAnimationFrame(() => this.detail()), { passive: true });
      this.body.addEventListener("pointermove", (event) => this.point(event));
      this.body.addEventListener("click", (event) => { this.point(event); this.open(); });
      this.body.addEventListener("keydown", (event) => this.key(event));
      const jump = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const share = (event.clientY - this.overview.getBoundingClientRect().top) / OVERVIEW;
        this.body.scrollTop = share * this.rows.length * this.line - this.tall / 2;
      };
      for (const kind of ["pointerdown", "pointermove"]) this.whole.addEventListener(kind, jump);
    }

    /** "parts": outputs that diverge first, the earliest at the top; then those whose logprobs differ; then the equal ones. */
    order(kind) {
      const rank = (row) => (row.parts !== null ? 0 : row.first !== null ? 1 : 2);
      this.sorted = this.rows.map((_, i) => i);
      if (kind === "parts") {
        this.sorted.sort((i, j) => {
          const [x, y] = [this.rows[i], this.rows[j]];
          return rank(x) - rank(y) || (x.parts ?? x.first ?? 0) - (y.parts ?? y.first ?? 0) || i - j;
        });
      }
      this.current = null;
      this.draw();
    }

    /** Every item's levels, block by block, without holding up the page. */
    async load() {
      for (let block = 0; block * this.store.size < this.rows.length; block++) {
        const items = await this.store.load(block);
        items.forEach((levels, i) => { this.levels[block * this.store.size + i] = levels; });
        if (block % 8 === 7) { this.detail(); await new Promise((go) => setTimeout(go)); }
      }
      this.root.dataset.ready = "";
      this.draw();
    }

    draw() {
      if (!this.root.clientWidth) return;
      this.colours = palette();
      this.scale();
      if (this.many) this.all();
      this.detail();
    }

    scale() {
      const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find((s) => this.width / s <= this.root.clientWidth / 70) ?? 20000;
      const marks = [];
      for (let token = 0; token < this.width * (1 - 46 / this.root.clientWidth); token += step) {  // the last has room
        const mark = make("span", "", token ? token.toLocaleString("en-US") : "token 0");
        mark.style.left = `${(100 * token) / this.width}%`;
        marks.push(mark);
      }
      this.axis.replaceChildren(...marks);
    }

    all() {
      const lines = Math.min(this.rows.length, OVERVIEW * ratio());
      paint(this.overview, image(this, 0, this.rows.length, lines, this.root.clientWidth * ratio()), this.root.clientWidth, OVERVIEW);
      this.view();
    }

    view() {
      const height = this.rows.length * this.line;
      this.frame.style.top = `${(OVERVIEW * this.body.scrollTop) / height}px`;
      this.frame.style.height = `${Math.max(3, (OVERVIEW * this.tall) / height)}px`;
    }

    detail() {
      if (!this.colours) return;
      const from = Math.floor(this.body.scrollTop / this.line);
      const to = Math.min(this.rows.length, Math.ceil((this.body.scrollTop + this.tall) / this.line) + 1);
      this.canvas.style.top = `${from * this.line}px`;
      const height = (to - from) * this.line;
      paint(this.canvas, image(this, from, to, to - from, this.body.clientWidth * ratio()), this.body.clientWidth, height);
      const context = this.canvas.getContext("2d");
      const [gap, ink] = [ratio(), getComputedStyle(this.root).getPropertyValue("--ink")];
      for (let i = from; i < to; i++) context.clearRect(0, (i - from + 1) * this.line * ratio() - gap, this.canvas.width, gap);
      this.ticks(context, from, to);
      if (this.current !== null && this.current >= from && this.current < to) {
        context.strokeStyle = ink;
        context.lineWidth = gap;
        context.strokeRect(gap / 2, (this.current - from) * this.line * ratio() - gap / 2, this.canvas.width - gap, this.line * ratio());
      }
      if (this.many) this.view();
    }

    /** Where outputs diverge, never thinner than two pixels: in a wide map a token is less than one. */
    ticks(context, from, to) {
      const wide = Math.max(2 * ratio(), Math.ceil(this.canvas.width / this.width));
      context.fillStyle = `rgb(${this.colours[PARTS]?.join(" ")})`;
      for (let place = from; place < to; place++) {
        const { parts } = this.rows[this.sorted[place]];
        if (parts === null) continue;
        const x = Math.floor((parts * this.canvas.width) / this.width);
        context.fillRect(x, (place - from) * this.line * ratio(), wide, this.line * ratio() - ratio());
      }
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect();
      const place = Math.floor((event.clientY - this.body.getBoundingClientRect().top + this.body.scrollTop) / this.line);
      const token = Math.floor(((event.clientX - box.left) / box.width) * this.width);
      if (place >= 0 && place < this.rows.length) this.choose(place, token);
    }

    choose(place, token) {
      if (place !== this.current) { this.current = place; this.detail(); }
      const i = this.sorted[place];
      const row = this.rows[i];
      this.body.classList.toggle("opens", row.row !== null);
      const whole = row.parts !== null ? `outputs diverge at token ${row.parts}`
        : row.first !== null ? `same tokens, logprobs differ from token ${row.first}` : "equal, every bit";
      const here = token !== undefined && token < row.tokens ? said(state(row, this.levels[i], token)) : null;
      this.readout.replaceChildren(make("strong", "", row.name), make("span", "", ` ${whole}`),
        make("span", "at", here === null ? "" : ` token ${token}: ${here}`));
    }

    key(event) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) {
        event.preventDefault();
        const place = Math.min(this.rows.length - 1, Math.max(0, this.current === null ? 0 : this.current + step));
        const top = place * this.line;
        if (top < this.body.scrollTop) this.body.scrollTop = top;
        else if (top + this.line > this.body.scrollTop + this.tall) this.body.scrollTop = top + this.line - this.tall;
        this.choose(place);
      } else if (event.key === "Enter") this.open();
    }

    open() {
      const row = this.current === null ? null : this.rows[this.sorted[this.current]].row;
      if (row !== null) report.openRow("outputs", row);
    }
  }

  report.start.push(() => {
    const root = document.querySelector("[data-map]");
    if (root) new DivergenceMap(root);
  });
})();
