"use strict";
// Everything is readable without this: it sorts a table by a column, narrows it to the rows that hold some words, and
// tells the values of curves below the pointer.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0], heads = table.tHead.rows[0].cells;
  [...heads].forEach((head, column) => {
    head.tabIndex = 0;      // the cell itself: on paper a button would not be repeated on the next sheet
    head.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); head.click(); }
    });
    head.addEventListener("click", () => {
      const was = head.getAttribute("aria-sort"), number = head.classList.contains("n");
      const down = was ? was === "ascending" : number;
      const value = row => { const cell = row.cells[column]; return cell.dataset.v ?? cell.textContent; };
      const sign = down ? -1 : 1;
      for (const heading of body.querySelectorAll(".group")) heading.remove();
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (number) {
          const [p, q] = [x, y].map(v => v === "" ? NaN : Number(v));
          if (isNaN(p) || isNaN(q)) return isNaN(p) - isNaN(q);
          return sign * (p - q);
        }
        return sign * x.localeCompare(y, "en", {numeric: true});
      });
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  });
}
for (const field of document.querySelectorAll("input[data-table]")) {
  const table = document.getElementById(field.dataset.table), told = field.parentElement.querySelector("output");
  const rows = [...table.tBodies[0].rows].filter(row => !row.classList.contains("group")), texts = rows.map(row => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const heading of table.querySelectorAll(".group")) heading.hidden = words.length > 0;
    rows.forEach((row, k) => { row.hidden = !words.every(word => texts[k].includes(word)); shown += !row.hidden; });
    told.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length}`;
  });
}
for (const drawing of document.querySelectorAll("svg[data-x]")) {
  const [x_axis, y_axis] = [drawing.dataset.x, drawing.dataset.y].map(words => words.split(" ").map(Number));
  const value = ([low, high, start, end, log], place) => {
    const share = (place - start) / (end - start);
    return log ? low * (high / low) ** share : low + share * (high - low);
  };
  const percent = "percent" in drawing.dataset, large = 1e5;
  const shown = (number, percent) => percent ? `${(100 * number).toFixed(1)}%` :
    Math.abs(number) >= large ? Math.round(number).toLocaleString("en") : String(Number(number.toPrecision(4)));
  const lines = [...drawing.querySelectorAll("path[data-name]")].map(path => [
    path.dataset.name, path.getAttribute("d").slice(1).split("L").map(point => point.split(" ").map(Number))]);
  if (!lines.length) continue;
  const box = document.createElement("div"), mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
  box.className = "value"; box.hidden = true; mark.setAttribute("class", "mark");
  drawing.parentElement.append(box); drawing.append(mark);
  const leave = () => { box.hidden = true; mark.setAttribute("d", ""); };
  const show = event => {
    const frame = drawing.getBoundingClientRect(), scale = drawing.viewBox.baseVal.width / frame.width;
    const at = (event.clientX - frame.left) * scale;
    const near = lines.map(([name, points]) => [name, points.reduce(
      (best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best)]);
    const place = near.reduce((best, one) => Math.abs(one[1][0] - at) < Math.abs(best[1][0] - at) ? one : best)[1][0];
    mark.setAttribute("d", `M${place} ${y_axis[2]}L${place} ${y_axis[3]}`);
    const step = value(x_axis, place);
    box.replaceChildren(`${drawing.dataset.of} ${drawing.dataset.of === "step" ? Math.round(step).toLocaleString("en") : shown(step)}`);
    for (const [name, point] of near.filter(one => Math.abs(one[1][0] - place) < 2)) {
      const number = document.createElement("b");
      number.textContent = shown(value(y_axis, point[1]), percent);
      box.append(document.createElement("br"), `${name} `, number);
    }
    box.hidden = false;
    const left = place / scale, width = box.offsetWidth;
    box.style.left = `${left + 12 + width < frame.width ? left + 12 : Math.max(0, left - 12 - width)}px`;
    box.style.top = `${y_axis[3] / scale + 4}px`;
  };
  for (const name of ["pointermove", "pointerdown"]) drawing.addEventListener(name, show);
  drawing.addEventListener("pointerleave", leave);
}
