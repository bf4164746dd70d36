"use strict";
// All of the page is there without this: it only lets tables be sorted and searched, and the theme be chosen.
(function () {
  function themes() {
    const button = document.getElementById("theme");
    const names = ["system", "light", "dark"];
    let at = 0;
    button.hidden = false;
    button.addEventListener("click", function () {
      at = (at + 1) % names.length;
      if (at) document.documentElement.dataset.theme = names[at];
      else delete document.documentElement.dataset.theme;
      button.textContent = "Theme: " + names[at];
    });
  }

  function valueOf(row, column) {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a !== typeof b) return typeof a === "number" ? 1 : -1;
    return a < b ? -1 : a > b ? 1 : 0;
  }

  function sortable(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    const body = table.tBodies[0];
    if (body.rows.length < 2) return;
    heads.forEach(function (head, column) {
      if (head.querySelector(".hidden")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.textContent = "";
      head.append(button);
      button.addEventListener("click", function () {
        const falls = head.getAttribute("aria-sort") !== "descending";
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const rows = Array.from(body.rows);
        rows.sort(function (a, b) {
          const order = compare(valueOf(a, column), valueOf(b, column));
          return falls ? -order : order;
        });
        body.append(...rows);
      });
    });
  }

  function searchable(table) {
    const label = document.createElement("label");
    const field = document.createElement("input");
    label.className = "filter";
    label.append("Search these rows");
    field.type = "search";
    label.append(field);
    table.parentNode.before(label);
    field.addEventListener("input", function () {
      const wanted = field.value.toLowerCase();
      for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }

  themes();
  for (const table of document.querySelectorAll("table")) {
    sortable(table);
    if (table.dataset.filter) searchable(table);
  }
}());
