//! Owns the selection of seeds.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// One seed, or a range of seeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seeds(RangeInclusive<u64>);

/// The text is no seed.
#[derive(Debug, thiserror::Error)]
#[error("a seed is a number, several are two numbers: 1-10")]
pub struct NoSeeds;

impl Seeds {
    /// All seeds.
    pub fn all(&self) -> impl Iterator<Item = u64> + use<> {
        self.0.clone()
    }

    /// Number of seeds.
    pub fn count(&self) -> u64 {
        (self.0.end() - self.0.start()).saturating_add(1)
    }

    /// The first seed.
    pub fn first(&self) -> u64 {
        *self.0.start()
    }
}

impl Default for Seeds {
    fn default() -> Self {
        Self(1..=1)
    }
}

impl fmt::Display for Seeds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            1 => self.first().fmt(out),
            _ => write!(out, "{}-{}", self.0.start(), self.0.end()),
        }
    }
}

impl FromStr for Seeds {
    type Err = NoSeeds;

    fn from_str(text: &str) -> Result<Self, NoSeeds> {
        let number = |text: &str| text.parse::<u64>().map_err(|_| NoSeeds);
        let ends = text.split_once("..").or_else(|| text.split_once('-'));
        let (first, last) = match ends {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(text)?, number(text)?),
        };
        if first > last {
            return Err(NoSeeds);
        }
        Ok(Self(first..=last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_one_or_several() {
        for (text, count, shown) in [
            ("7", 1, "7"),
            ("1-10", 10, "1-10"),
            ("1..10", 10, "1-10"),
            ("3-3", 1, "3"),
        ] {
            let seeds: Seeds = text.parse().unwrap();
            assert_eq!((seeds.count(), seeds.to_string().as_str()), (count, shown));
        }
        assert!(
            ["", "x", "2-1", "-3", "1-"]
                .iter()
                .all(|text| text.parse::<Seeds>().is_err())
        );
    }
}
