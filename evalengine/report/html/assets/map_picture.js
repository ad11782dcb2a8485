"use strict";
// What the divergence map looks like: the states of tokens, their colours, and images of them on canvases.
report.picture = (() => {
  // 0 equal bits and 1 to 8 the levels of comparison_page.py; then the token that differs, and what follows it. The legend
  // has a swatch for each. Levels that are not unpacked yet are drawn as the first.
  const PARTS = 9, AFTER = 10, UNKNOWN = 11;

  /** A swatch for each state, whose colours the map takes. diverge: whether any outputs do. */
  function legend(diverge) {
    const { limits, odd } = report.data("map");
    const last = limits.length;
    const swatch = (state, title) => ({ is: "i", "data-state": state, title });
    const ranges = limits.map((_, i) => i ? `${limits[i - 1]} to ${limits[i]}` : `below ${limits[0]}`).concat(`from ${limits[last - 1]}`);
    const levels = ranges.map((range, i) => swatch(i + 1, `${range} nat`));
    return report.make("p", "map-legend", [
      [swatch(0, "equal bits"), "equal bits"],
      [levels, `|Δ logprob| ${limits[0]} … ${limits[last - 1]} nat`],
      odd ? [swatch(8, "not finite"), "not finite"] : null,
      diverge ? [swatch(PARTS, "the first token that differs"), "outputs diverge"] : null,
      diverge ? [swatch(AFTER, "after the divergence"), "after that"] : null,
    ].filter(Boolean).map((entry) => report.make("span", "", entry)));
  }

  /** levels: a digit a token, or null while it is packed. */
  function state(row, levels, token) {
    if (row.parts !== null && token >= row.parts) return token === row.parts ? PARTS : AFTER;
    if (levels === null) return row.first !== null && token >= row.first ? UNKNOWN : 0;
    return token < levels.length ? levels.charCodeAt(token) - 48 : 0;
  }

  function said(value) {
    const words = { 0: "equal bits", 8: "logprobs differ, one is not finite", [PARTS]: "the first that differs", [AFTER]: "after the divergence", [UNKNOWN]: "…" };
    return words[value] ?? `|Δ logprob| ${document.querySelector(`[data-state="${value}"]`).title}`;
  }

  const ratio = () => Math.max(1, Math.round(devicePixelRatio));

  /** The colours of the legend's swatches, as [r, g, b] by state: page.css alone says what a state looks like. */
  function palette() {
    const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const colours = [];
    for (const swatch of document.querySelectorAll("[data-state]")) {
      context.fillStyle = getComputedStyle(swatch).backgroundColor;
      context.fillRect(0, 0, 1, 1);
      colours[Number(swatch.dataset.state)] = [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    }
    colours[UNKNOWN] = colours[1];
    return colours;
  }

  /** `lines` lines for the items from..to of a map's order, at most `most` pixels wide: what shares a pixel is averaged. */
  function image(map, from, to, lines, most) {
    const columns = Math.min(map.width, Math.max(1, most));
    const result = new ImageData(columns, lines);
    const sums = new Float32Array(columns * 4);
    for (let line = 0; line < lines; line++) {
      const [begin, end] = [from + Math.floor((line * (to - from)) / lines), from + Math.floor(((line + 1) * (to - from)) / lines)];
      sums.fill(0);
      for (let place = begin; place < end; place++) add(sums, map, map.sorted[place], columns);
      for (let column = 0; column < columns; column++) {
        const inked = sums[4 * column + 3];
        if (!inked) continue;
        const at = 4 * (line * columns + column);
        const tokens = Math.ceil(((column + 1) * map.width) / columns) - Math.ceil((column * map.width) / columns);
        for (let c = 0; c < 3; c++) result.data[at + c] = sums[4 * column + c] / inked;
        result.data[at + 3] = (255 * inked) / (tokens * (end - begin));
      }
    }
    return result;
  }

  function add(sums, map, i, columns) {
    const row = map.rows[i];
    for (let token = 0; token < row.tokens; token++) {
      const colour = map.colours[state(row, map.levels[i], token)];
      const at = 4 * Math.floor((token * columns) / map.width);
      sums[at] += colour[0];
      sums[at + 1] += colour[1];
      sums[at + 2] += colour[2];
      sums[at + 3] += 1;
    }
  }

  /** Stretches an image over a canvas of so many CSS pixels, with hard edges. */
  function paint(canvas, picture, width, height) {
    Object.assign(canvas, { width: width * ratio(), height: height * ratio() });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const sheet = new OffscreenCanvas(picture.width, picture.height);
    sheet.getContext("2d").putImageData(picture, 0, 0);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, 0, 0, canvas.width, canvas.height);
  }

  return { PARTS, legend, state, said, palette, paint, ratio, image };
})();
