() => {
    // While a prompt is typed, the browser suggests the pictures that the model knows.
    document.addEventListener("focusin", ({target}) => {
        const list = target.closest("[class*=suggests-]")?.className.match(/suggests-\d+/)[0];
        if (list && target.matches("input")) target.setAttribute("list", list);
    });

    // Gradio opens the list of a field at every key, also at those that leave the field.
    document.addEventListener("keydown", (event) => {
        const leaves = event.key === "Tab" || event.key === "Shift";
        if (leaves && event.target.matches("[role=combobox]")) event.stopPropagation();
    }, true);

    // As in other lists of tabs, the arrow keys move between them, and Tab leaves them.
    const lists = document.querySelectorAll("[role=tablist]");
    const tabs = (list) => [...list.querySelectorAll("[role=tab]")];
    const rove = () => lists.forEach((list) => tabs(list).forEach((tab) => {
        tab.tabIndex = tab.getAttribute("aria-selected") === "true" ? 0 : -1;
    }));
    const changes = new MutationObserver(rove);
    lists.forEach((list) => changes.observe(list, {subtree: true, attributeFilter: ["aria-selected"]}));
    rove();
    document.addEventListener("keydown", (event) => {
        const list = event.target.matches("[role=tab]") && event.target.closest("[role=tablist]");
        if (!list) return;
        const all = tabs(list), now = all.indexOf(event.target);
        const next = {ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: -1}[event.key];
        if (next === undefined) return;
        event.preventDefault();
        const tab = all.at(next % all.length);
        tab.click();
        tab.focus();
    });
}
