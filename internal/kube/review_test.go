package kube

import (
	"errors"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
)

func TestReviewsOfMetrics(t *testing.T) {
	core := fake.NewClientset()
	core.PrependReactor("create", "tokenreviews", func(a k8stesting.Action) (bool, runtime.Object, error) {
		review := a.(k8stesting.CreateAction).GetObject().(*authenticationv1.TokenReview)
		if review.Spec.Token == "hung" {
			return true, nil, errors.New("timeout")
		}
		if review.Spec.Token != "bad" {
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{
				Username: review.Spec.Token, Groups: []string{"g"},
				Extra: map[string]authenticationv1.ExtraValue{"node": {"n1"}}}}
		}
		return true, review, nil
	})
	core.PrependReactor("create", "subjectaccessreviews", func(a k8stesting.Action) (bool, runtime.Object, error) {
		review := a.(k8stesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		what := review.Spec.NonResourceAttributes
		review.Status.Allowed = review.Spec.User != "eve" && what.Path == "/metrics" && what.Verb == "get" &&
			review.Spec.Groups[0] == "g" && review.Spec.Extra["node"][0] == "n1"
		review.Status.Denied = review.Spec.User == "denied"
		return true, review, nil
	})
	c := &Client{core: fakeKinds{core}}
	for token, want := range map[string]struct {
		user    string
		allowed bool
	}{"prometheus": {"prometheus", true}, "eve": {"eve", false}, "denied": {"denied", false}, "bad": {"", false}} {
		if user, allowed, err := c.ReviewMetrics(t.Context(), token); err != nil || user != want.user ||
			allowed != want.allowed {
			t.Errorf("%s: %q %v %v, want %+v", token, user, allowed, err, want)
		}
	}
	if _, _, err := c.ReviewMetrics(t.Context(), "hung"); err == nil ||
		!strings.Contains(err.Error(), "TokenReview: timeout") {
		t.Errorf("an API server that does not answer: %v", err)
	}
}
