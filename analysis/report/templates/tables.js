// Sort a table by a click on a heading, and filter the rows of a longer one by words. Without this script all is shown.
"use strict";
const MIN_FILTERED = 6; // rows from which on a table gets a field to filter them

const numeric = (text) => {
  const match = text.replace(/,/g, "").match(/-?\d+(\.\d+)?(e[+-]?\d+)?/);
  return match ? Number(match[0]) : NaN;
};

function sortRows(table, column, descending) {
  const body = table.tBodies[0];
  const asText = table.tHead.rows[0].cells[column].classList.contains("t");
  const key = (row) => row.cells[column].textContent.trim();
  const compare = (a, b) => {
    if (asText) return key(a).localeCompare(key(b), "en", { numeric: true }) * (descending ? -1 : 1);
    const [x, y] = [numeric(key(a)), numeric(key(b))];
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y); // rows without a number come last in either order
    return descending ? y - x : x - y;
  };
  body.append(...[...body.rows].sort(compare));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortRows(table, column, descending);
    });
  });
  if (table.tBodies[0].rows.length < MIN_FILTERED) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", "Filter rows");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.closest(".scroll").before(field);
}
