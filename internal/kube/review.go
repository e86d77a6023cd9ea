package kube

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReviewMetrics asks the API server whose a bearer token is, and whether that user may get the
// nonResourceURL /metrics. user is empty if the token is not valid.
func (c *Client) ReviewMetrics(ctx context.Context, token string) (user string, allowed bool, err error) {
	return c.Review(ctx, token, "/metrics")
}

// Review is ReviewMetrics for another nonResourceURL.
func (c *Client) Review(ctx context.Context, token, url string) (user string, allowed bool, err error) {
	review, err := c.core.TokenReviews().Create(ctx,
		&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
	if err != nil {
		return "", false, fmt.Errorf("create a TokenReview: %w", err)
	}
	if !review.Status.Authenticated || review.Status.User.Username == "" {
		return "", false, nil
	}
	who := review.Status.User
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range who.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	access, err := c.core.SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: who.Username, UID: who.UID, Groups: who.Groups, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: url, Verb: "get"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", false, fmt.Errorf("create a SubjectAccessReview: %w", err)
	}
	return who.Username, access.Status.Allowed && !access.Status.Denied, nil
}
