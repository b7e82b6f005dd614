"use strict";
// The page is complete without this: it opens the section that a link leads to, and offers to open or close them all.
function reveal() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", reveal);
reveal();
const sections = document.querySelectorAll("details.section");
for (const [id, open] of [["open-all", true], ["close-all", false]]) {
  const button = document.getElementById(id);
  button.hidden = false;
  button.addEventListener("click", () => sections.forEach((section) => { section.open = open; }));
}
