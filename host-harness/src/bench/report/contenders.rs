//! Owns the report's description of each contender: the meaning of its name, and its colour.

use plotters::style::RGBColor;

use super::select::unique;
use crate::bench::results::Results;
use crate::plot::tint;

/// The names that the report treats in a way of their own.
pub mod name {
    /// The Wasm filter that does nothing.
    pub const EMPTY: &str = "envoy+empty";
    /// The Wasm filter that only buffers.
    pub const BUFFER: &str = "envoy+buffer";
    /// The Wasm filter that parses the body once.
    pub const PARSE: &str = "envoy+parse";
    /// The Wasm filter that parses it twice.
    pub const PARSE_TWICE: &str = "envoy+parse2";
    /// pd-router in direct mode.
    pub const DIRECT: &str = "pd-router direct";
    /// pd-router with NIXL's hand-off.
    pub const NIXL: &str = "pd-router nixl";
}

/// Meaning of each name.
const MEANINGS: [(&str, &str); 20] = [
    (
        "envoy",
        "Envoy alone, to the decode engine: no prefill, no routing",
    ),
    (name::EMPTY, "the same with a Wasm filter that does nothing"),
    (
        name::BUFFER,
        "with a Wasm filter that buffers the body and looks at nothing",
    ),
    (
        name::PARSE,
        "with one that buffers the body and parses it once, typed",
    ),
    (name::PARSE_TWICE, "with one that parses it twice"),
    (
        "pd-router aggregated",
        "pd-router in Envoy: one worker runs the whole request",
    ),
    (
        name::DIRECT,
        "pd-router in Envoy: selects both workers, names them in headers",
    ),
    (
        name::NIXL,
        "pd-router in Envoy: runs the prefill leg, splices vLLM's hand-off into the decode leg",
    ),
    (
        "pd-router sglang",
        "pd-router in Envoy: SGLang's hand-off, both legs at once",
    ),
    (
        "pd-router wasmtime",
        "pd-router with NIXL's hand-off, in the project's own wasmtime host",
    ),
    (
        "pd-router direct, no accounting",
        "direct mode, the answer's tokens not counted",
    ),
    (
        "pd-router round_robin",
        "a control: pd-router with NIXL's hand-off, prefill workers chosen in turn",
    ),
    (
        "sglang-router",
        "SGLang's router alone; in its prefill/decode mode it chooses at random whatever its policies, as its log says",
    ),
    ("smg sglang", "smg alone, SGLang's hand-off"),
    ("smg nixl", "smg alone, vLLM's hand-off"),
    ("vllm-router", "vLLM's router alone, vLLM's hand-off"),
    ("envoy+sglang-router", "SGLang's router behind Envoy"),
    ("envoy+smg sglang", "smg behind Envoy, SGLang's hand-off"),
    ("envoy+smg nixl", "smg behind Envoy, vLLM's hand-off"),
    ("envoy+vllm-router", "vLLM's router behind Envoy"),
];

/// Meaning of a name, if known.
pub fn meaning(contender: &str) -> Option<&'static str> {
    let mut known = MEANINGS.iter();
    known
        .find(|(name, _)| *name == contender)
        .map(|(_, meaning)| *meaning)
}

/// Origin of a contender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Envoy without a router: a reference, not a rival.
    Control,
    /// The project's own.
    PdRouter,
    /// Another router.
    Peer,
}

impl Family {
    /// Origin of a contender, by its name.
    pub fn of(contender: &str) -> Self {
        match contender {
            "envoy" | name::EMPTY | name::BUFFER | name::PARSE | name::PARSE_TWICE => Self::Control,
            _ if contender.starts_with("pd-router") => Self::PdRouter,
            _ => Self::Peer,
        }
    }

    /// Colours for contenders of this origin, in their order of appearance.
    const fn colors(self) -> &'static [RGBColor] {
        match self {
            Self::Control => &[
                RGBColor(100, 108, 120),
                RGBColor(138, 138, 138),
                RGBColor(176, 176, 168),
                RGBColor(120, 130, 110),
                RGBColor(150, 135, 125),
            ],
            Self::PdRouter => &[
                RGBColor(240, 140, 20),
                RGBColor(209, 36, 47),
                RGBColor(227, 100, 170),
                RGBColor(150, 75, 30),
                RGBColor(214, 180, 30),
                RGBColor(165, 50, 110),
            ],
            Self::Peer => &[
                RGBColor(31, 119, 180),
                RGBColor(23, 170, 190),
                RGBColor(44, 150, 60),
                RGBColor(128, 90, 213),
                RGBColor(75, 100, 180),
                RGBColor(15, 120, 120),
                RGBColor(120, 170, 40),
                RGBColor(110, 60, 180),
            ],
        }
    }
}

/// All contenders and their colours, no two the same: the page hides lines by their colour.
pub struct Palette(Vec<(String, RGBColor)>);

impl Palette {
    /// A palette for all contenders in the results.
    pub fn of(results: &Results) -> Self {
        let rows = results.rows.iter().map(|row| &row.contender);
        let memory = results.memory.iter().map(|row| &row.contender);
        let trace = results.trace.iter().map(|row| &row.contender);
        let mut palette = Self(Vec::new());
        for name in unique(rows.chain(memory).chain(trace)) {
            let family = Family::of(name);
            let before = palette.0.iter();
            let at = before.filter(|(one, _)| Family::of(one) == family).count();
            let colors = family.colors();
            let color = tint(colors[at % colors.len()], at / colors.len());
            palette.0.push((name.clone(), color));
        }
        palette
    }

    /// Each contender's name and colour.
    pub fn iter(&self) -> impl Iterator<Item = (&str, RGBColor)> {
        self.0.iter().map(|(name, color)| (name.as_str(), *color))
    }

    /// A contender's colour.
    pub fn color(&self, contender: &str) -> RGBColor {
        let mut known = self.iter();
        known
            .find(|(name, _)| *name == contender)
            .map_or(RGBColor(0, 0, 0), |(_, color)| color)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::{GRID, INK, hex};
    use std::collections::HashSet;

    #[test]
    fn no_two_contenders_have_one_colour() {
        let families = [Family::Control, Family::PdRouter, Family::Peer];
        let colors = families.iter().flat_map(|family| family.colors());
        let tints = colors.flat_map(|color| (0..4).map(|paler| hex(tint(*color, paler))));
        let ruled = [hex(INK), hex(GRID)];
        let all: Vec<String> = tints.chain(ruled).collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }

    #[test]
    fn every_name_has_a_family() {
        assert_eq!(Family::of("envoy+parse2"), Family::Control);
        assert_eq!(Family::of("pd-router round_robin"), Family::PdRouter);
        assert_eq!(Family::of("envoy+smg nixl"), Family::Peer);
        assert!(meaning("envoy").is_some() && meaning("another").is_none());
    }
}
