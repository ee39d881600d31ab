"use strict";
// Everything is readable without this: it sorts a table by a column and narrows it to the rows that hold some words.
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
  const rows = [...table.tBodies[0].rows], texts = rows.map(row => row.textContent.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, k) => { row.hidden = !words.every(word => texts[k].includes(word)); shown += !row.hidden; });
    told.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length}`;
  });
}
