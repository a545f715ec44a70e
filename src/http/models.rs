//! GET /v1/models: the names this server answers to.

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::state::AppState;

/// Every name.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// One entry a name.
    pub data: Vec<ModelCard>,
}

/// One name of the model.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ModelCard {
    /// The name.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// `flashd`.
    pub owned_by: &'static str,
    /// The first name, which answers carry.
    pub root: String,
    /// Always null.
    pub parent: Option<String>,
    /// Longest prompt plus output in tokens.
    pub max_model_len: usize,
    /// Always empty.
    #[schema(value_type = Vec<Object>)]
    pub permission: [(); 0],
}

/// Lists the names of the model.
#[utoipa::path(get, path = "/v1/models", tag = "openai", security((), ("api_key" = [])), responses(
    (status = 200, description = "The names", body = ModelList),
    (status = 401, description = "No valid API key", body = ErrorBody),
    (status = 503, description = "Loading, draining or dead", body = ErrorBody),
))]
pub async fn list(State(state): State<AppState>) -> Json<ModelList> {
    let data = state.config().served_model_names.iter().map(|name| card(&state, name)).collect();
    Json(ModelList { object: "list", data })
}

/// One name of the model.
///
/// # Errors
/// 404 for a name that is not served.
#[utoipa::path(get, description = "One name of the model.", path = "/v1/models/{model}", tag = "openai", security((), ("api_key" = [])),
    params(("model" = String, Path, description = "A served name; may hold slashes")),
    responses(
        (status = 200, description = "The name", body = ModelCard),
        (status = 400, description = "The name is not UTF-8", body = ErrorBody),
        (status = 401, description = "No valid API key", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 503, description = "Loading, draining or dead", body = ErrorBody),
    ))]
pub async fn get(
    State(state): State<AppState>,
    name: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<Json<ModelCard>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    check_model(&state, Some(&name))?;
    Ok(Json(card(&state, &name)))
}

/// Refuses a name that is not served; no name is any name.
///
/// # Errors
/// 404.
pub fn check_model(state: &AppState, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if !state.config().served_model_names.iter().any(|served| served == name) => {
            Err(ApiError::unknown_model(name))
        }
        _ => Ok(()),
    }
}

fn card(state: &AppState, name: &str) -> ModelCard {
    let config = state.config();
    ModelCard {
        id: name.to_owned(),
        object: "model",
        created: config.created_unix_s,
        owned_by: "flashd",
        root: config.primary_name().to_owned(),
        parent: None,
        max_model_len: state.engine().limits().max_model_len,
        permission: [],
    }
}
