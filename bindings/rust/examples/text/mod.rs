//! A text whose characters (bytes) are tokens, by their places in its alphabet.
use distgrad::{Result as DistgradResult, Tensor};
use std::{error::Error, fs};

/// The last twentieth of a text is for tests.
const TEST_SHARE: usize = 20;

pub struct Text {
    alphabet: Vec<u8>,
    train: Vec<i64>,
    test: Vec<i64>,
}

impl Text {
    /// Reads a file, whose last twentieth is longer than a piece.
    pub fn load(path: &str, piece: usize) -> Result<Self, Box<dyn Error>> {
        let bytes = fs::read(path).map_err(|error| format!("cannot read {path}: {error}"))?;
        let mut alphabet = bytes.clone();
        alphabet.sort_unstable();
        alphabet.dedup();
        let mut token_of = [0; 256];
        for (token, byte) in alphabet.iter().enumerate() {
            token_of[usize::from(*byte)] = token as i64;
        }
        let tokens: Vec<i64> = bytes.iter().map(|byte| token_of[usize::from(*byte)]).collect();
        let (train, test) = tokens.split_at(tokens.len() - tokens.len() / TEST_SHARE);
        if test.len() <= piece + 1 {
            return Err(format!("{path} is too short for pieces of {piece} characters").into());
        }
        Ok(Self { alphabet, train: train.to_vec(), test: test.to_vec() })
    }

    pub fn alphabet(&self) -> i64 {
        self.alphabet.len() as i64
    }

    /// Pieces from places that `step` decides, and for each place the token behind it: two of int64
    /// `[count, length]`.
    pub fn pieces(
        &self,
        step: usize,
        count: usize,
        length: usize,
    ) -> DistgradResult<(Tensor, Tensor)> {
        let mut random = Random::new(step as u64);
        let places = self.train.len() - length - 1;
        let begins = (0..count).map(|_| random.below(places));
        stack(&self.train, begins, count, length)
    }

    /// Pieces that are spread over what is for tests.
    pub fn test_pieces(&self, count: usize, length: usize) -> DistgradResult<(Tensor, Tensor)> {
        let places = self.test.len() - length - 1;
        stack(&self.test, (0..count).map(|i| places * i / count), count, length)
    }

    pub fn decode(&self, tokens: &[i64]) -> String {
        let bytes: Vec<u8> = tokens.iter().map(|token| self.alphabet[*token as usize]).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The token of a line's end, or the first one if there is none.
    pub fn line_end(&self) -> i64 {
        self.alphabet.iter().position(|byte| *byte == b'\n').unwrap_or(0) as i64
    }
}

fn stack(
    tokens: &[i64],
    begins: impl Iterator<Item = usize>,
    count: usize,
    length: usize,
) -> DistgradResult<(Tensor, Tensor)> {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for begin in begins {
        inputs.extend_from_slice(&tokens[begin..begin + length]);
        targets.extend_from_slice(&tokens[begin + 1..begin + 1 + length]);
    }
    let shape = [count as i64, length as i64];
    Ok((Tensor::from_vec(inputs, &shape)?, Tensor::from_vec(targets, &shape)?))
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
    /// One of the places of `probabilities`, whose sum is 1.
    pub fn choose(&mut self, probabilities: &[f32]) -> usize {
        let mut left = (self.next() >> 40) as f32 / (1u64 << 24) as f32;
        for (place, probability) in probabilities.iter().enumerate() {
            left -= probability;
            if left < 0.0 {
                return place;
            }
        }
        probabilities.len() - 1
    }
}
