// The theme lets wide tables scroll, and a keyboard does not reach them.
addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
});
