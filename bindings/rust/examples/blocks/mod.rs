//! A transformer that predicts the next character of a text, cut into consecutive stages: pre-norm,
//! without biases.
use distgrad::{op, Result, Tensor, Value};

const HEADS: i64 = 4;
/// Of all first weights; those that add to what a block was given have less, so that the sum of all
/// blocks does not grow with their number.
const DEVIATION: f64 = 0.02;

#[derive(Clone, Copy)]
pub struct Shape {
    pub tokens: i64,  // in the alphabet
    pub context: i64, // how many tokens it sees at most
    pub width: i64,   // a multiple of the heads
    pub blocks: i64,
}

#[derive(Clone)]
struct Block {
    attention_norm: Tensor,
    attention: Tensor,
    attention_out: Tensor,
    hidden_norm: Tensor,
    hidden: Tensor,
    hidden_out: Tensor,
}

/// Some of the blocks; the first stage also has the embeddings of tokens and of their places, the
/// last one the scores of tokens. A clone has the same parameters.
#[derive(Clone)]
pub struct Stage {
    width: i64,
    begin: i64, // the number of its first block
    embeddings: Option<[Tensor; 2]>,
    blocks: Vec<Block>,
    scores: Option<[Tensor; 2]>, // their norm, and the weight
}

impl Stage {
    /// Stage `index` of `count`, which are as many as the blocks at most. The parameters are the
    /// same however the model is cut.
    pub fn new(shape: Shape, index: i64, count: i64) -> Result<Self> {
        let width = shape.width;
        let weight = |shape: &[i64], deviation: f64| {
            Tensor::randn(shape)?.mul_scalar(deviation)?.require_grad()
        };
        let norm = || Tensor::ones(&[width], distgrad::Dtype::FLOAT32)?.require_grad();
        // Each part has a seed of its own, so that a stage need not make those before it.
        let seed = |part: i64| distgrad::manual_seed(part as u64);
        let (begin, end) = (shape.blocks * index / count, shape.blocks * (index + 1) / count);
        let added = DEVIATION / (2.0 * shape.blocks as f64).sqrt();

        let mut stage = Self { width, begin, embeddings: None, blocks: Vec::new(), scores: None };
        if begin == 0 {
            seed(0)?;
            let tokens = weight(&[shape.tokens, width], DEVIATION)?;
            stage.embeddings = Some([tokens, weight(&[shape.context, width], DEVIATION)?]);
        }
        for block in begin..end {
            seed(1 + block)?;
            stage.blocks.push(Block {
                attention_norm: norm()?,
                attention: weight(&[3 * width, width], DEVIATION)?,
                attention_out: weight(&[width, width], added)?,
                hidden_norm: norm()?,
                hidden: weight(&[4 * width, width], DEVIATION)?,
                hidden_out: weight(&[width, 4 * width], added)?,
            });
        }
        if end == shape.blocks {
            seed(1 + shape.blocks)?;
            stage.scores = Some([norm()?, weight(&[shape.tokens, width], DEVIATION)?]);
        }
        Ok(stage)
    }

    /// The first stage takes int64 `[n, length]`, the others what the one before has given, `[n,
    /// length, width]`; the last one gives the scores of the next tokens, `[n, length, tokens]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = match &self.embeddings {
            None => x.clone(),
            Some([tokens, places]) => {
                tokens.embedding(x)?.add(&places.narrow(0, 0, x.shape()[1])?)?
            }
        };
        for block in &self.blocks {
            x = self.run(block, &x)?;
        }
        match &self.scores {
            None => Ok(x),
            Some([norm, weight]) => {
                x.layer_norm(&[self.width], Some(norm), None)?.linear(weight, None)
            }
        }
    }

    fn run(&self, block: &Block, x: &Tensor) -> Result<Tensor> {
        let [n, length, width] = [x.shape()[0], x.shape()[1], self.width];
        // Queries, keys and values, each [n, heads, length, width / heads].
        let qkv = x
            .layer_norm(&[width], Some(&block.attention_norm), None)?
            .linear(&block.attention, None)?
            .view(&[n, length, 3, HEADS, width / HEADS])?
            .permute(&[2, 0, 3, 1, 4])?;
        let [q, k, v] = [qkv.select(0, 0)?, qkv.select(0, 1)?, qkv.select(0, 2)?];
        // No token sees those behind it.
        let causal = [Value::None, 0.0.into(), true.into()];
        let [mask, dropout, causal] = causal;
        let seen = op(
            "aten::scaled_dot_product_attention",
            &[(&q).into(), (&k).into(), (&v).into(), mask, dropout, causal],
        )?;
        let seen = seen.transpose(1, 2)?.reshape(&[n, length, width])?;
        let y = x.add(&seen.linear(&block.attention_out, None)?)?;
        let hidden = y
            .layer_norm(&[width], Some(&block.hidden_norm), None)?
            .linear(&block.hidden, None)?
            .gelu()?;
        y.add(&hidden.linear(&block.hidden_out, None)?)
    }

    /// Each by a name of its own in the whole model.
    pub fn parameters(&self) -> Vec<(String, &Tensor)> {
        let mut all = Vec::new();
        if let Some([tokens, places]) = &self.embeddings {
            all.extend([("tokens".into(), tokens), ("places".into(), places)]);
        }
        for (number, block) in (self.begin..).zip(&self.blocks) {
            let of_block = [
                ("attention_norm", &block.attention_norm),
                ("attention", &block.attention),
                ("attention_out", &block.attention_out),
                ("hidden_norm", &block.hidden_norm),
                ("hidden", &block.hidden),
                ("hidden_out", &block.hidden_out),
            ];
            all.extend(of_block.map(|(name, tensor)| (format!("block{number}.{name}"), tensor)));
        }
        if let Some([norm, weight]) = &self.scores {
            all.extend([("scores_norm".into(), norm), ("scores".into(), weight)]);
        }
        all
    }
}

/// The mean cross entropy, in nats a token, of scores as the last stage gives them.
pub fn loss(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    scores.flatten(0, 1)?.cross_entropy_loss(&targets.flatten(0, 1)?)
}
